import sys
import time
from copy import deepcopy
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from broker.dialects.normalize import ARGUMENTS_DEPTH_MAX, Conversation, normalize
from broker.dialects.parts import Attachment, Image, Video

PIXEL = "data:image/png;base64,AAAA"
IMAGE = {"type": "image_url", "image_url": {"url": PIXEL, "detail": "low"}}
PLACE = {"type": "image"}
VIDEO = {"type": "video"}


def says(role: str, content: Any = "", **more: Any) -> dict[str, Any]:
    return {"role": role, "content": content, **more}


def text(value: str) -> dict[str, str]:
    return {"type": "text", "text": value}


def call(name: str, arguments: Any, id: str | None = "call_1") -> dict[str, Any]:
    return {"id": id, "type": "function", "function": {"name": name, "arguments": arguments}}


def canonical(*messages: dict[str, Any], **options: bool) -> list[dict[str, Any]]:
    return normalize(messages, **options).messages


def arguments_of(arguments: Any) -> Any:
    (message,) = canonical(says("assistant", "", tool_calls=[call("f", arguments)]))
    return message["tool_calls"][0]["function"]["arguments"]


# Roles


def test_an_empty_conversation_stays_empty() -> None:
    assert normalize([]) == Conversation([], ())


def test_a_developer_message_is_a_system_message() -> None:
    assert canonical(says("developer", "be brief")) == [says("system", "be brief")]


def test_a_function_result_is_a_tool_result_and_its_call_a_tool_call() -> None:
    assert canonical(
        says("assistant", None, function_call={"name": "now", "arguments": "{}"}),
        says("function", "noon", name="now"),
    ) == [
        says(
            "assistant", "", tool_calls=[{"type": "function", "function": {"name": "now", "arguments": {}}}]
        ),
        says("tool", "noon", name="now"),
    ]


# System messages


def test_leading_system_messages_are_joined_by_a_blank_line() -> None:
    messages = [says("system", "one"), says("developer", "two"), says("user", "hi")]
    expected = [says("system", "one\n\ntwo"), says("user", "hi")]
    assert canonical(*messages) == canonical(*messages, system_in_place=True) == expected


def test_a_late_system_message_is_hoisted_behind_the_leading_ones_and_what_it_parted_is_joined() -> None:
    assert canonical(says("system", "one"), says("user", "a"), says("system", "two"), says("user", "b")) == [
        says("system", "one\n\ntwo"),
        says("user", "a\n\nb"),
    ]


def test_a_late_system_message_stays_where_the_template_takes_it() -> None:
    messages = [
        says("system", "one"),
        says("user", "a"),
        says("system", "two"),
        says("system", "three"),
        says("user", "b"),
    ]
    assert canonical(*messages, system_in_place=True) == [
        says("system", "one"),
        says("user", "a"),
        says("system", "two\n\nthree"),
        says("user", "b"),
    ]


def test_system_messages_of_different_names_still_become_one() -> None:
    messages = [says("system", "one", name="x"), says("system", "two", name="y")]
    assert canonical(*messages) == [says("system", "one\n\ntwo")]


# Neighbours


def test_neighbours_of_one_role_are_joined_by_a_blank_line() -> None:
    assert canonical(says("user", "a"), says("user", "b")) == [says("user", "a\n\nb")]


def test_an_empty_neighbour_adds_no_blank_line() -> None:
    assert canonical(says("user", ""), says("user", "b"), says("user", None)) == [says("user", "b")]


def test_users_of_different_names_stay_apart() -> None:
    messages = [says("user", "a", name="bob"), says("user", "b", name="ann"), says("user", "c")]
    assert canonical(*messages) == messages
    assert canonical(says("user", "a", name="bob"), says("user", "b", name="bob")) == [
        says("user", "a\n\nb", name="bob")
    ]


def test_tool_results_are_kept_one_by_one_in_order() -> None:
    messages = [says("tool", "same", tool_call_id="1"), says("tool", "same", tool_call_id="2"), says("tool")]
    assert canonical(*messages) == messages


def test_joined_assistant_messages_keep_every_call_and_all_reasoning() -> None:
    assert canonical(
        says("assistant", "a", reasoning="first", tool_calls=[call("f", "{}", "1")]),
        says("assistant", None, reasoning_content="second", tool_calls=[call("g", "{}", "2")]),
    ) == [
        says(
            "assistant",
            "a",
            reasoning_content="first\n\nsecond",
            tool_calls=[call("f", {}, "1"), call("g", {}, "2")],
        )
    ]


def test_reasoning_sent_under_both_names_is_taken_once() -> None:
    message = says("assistant", "a", reasoning="why", reasoning_content="why")
    assert canonical(message) == [says("assistant", "a", reasoning_content="why")]


def test_a_string_beside_a_part_list_becomes_a_text_part() -> None:
    conversation = normalize(
        [
            says("user", "a"),
            says("user", "b"),
            says("user", [IMAGE, text("c")]),
            says("user", "d"),
            says("user"),
        ]
    )
    assert conversation.messages == [says("user", [text("a\n\nb"), PLACE, text("c"), text("d")])]
    assert conversation.attachments == (Image(PIXEL, "messages[2].content[0]", "low"),)


def test_part_lists_are_concatenated() -> None:
    conversation = normalize([says("user", [IMAGE, text("a")]), says("user", [text("b"), IMAGE])])
    assert conversation.messages == [says("user", [PLACE, text("a"), text("b"), PLACE])]
    assert [image.param for image in conversation.attachments] == [
        "messages[0].content[0]",
        "messages[1].content[1]",
    ]


# Content


@pytest.mark.parametrize("content", [None, "", [], [text("")]])
def test_content_that_says_nothing_is_an_empty_string(content: Any) -> None:
    assert canonical(says("user", content)) == [says("user", "")]


def test_missing_content_is_an_empty_string() -> None:
    assert canonical({"role": "assistant"}) == [says("assistant", "")]


def test_one_text_part_equals_the_plain_string() -> None:
    assert canonical(says("user", [text("hi")])) == canonical(says("user", "hi"))


def test_text_parts_of_one_message_are_joined_by_a_newline() -> None:
    parts = [text("a"), text(""), {"type": "input_text", "text": "b"}, {"type": "output_text", "text": "c"}]
    assert canonical(says("user", parts)) == [says("user", "a\nb\nc")]


def test_a_refusal_becomes_text_wherever_it_stands() -> None:
    assert canonical(says("assistant", [{"type": "refusal", "refusal": "no"}])) == [says("assistant", "no")]
    assert canonical(says("assistant", None, refusal="no")) == [says("assistant", "no")]
    assert canonical(says("assistant", "well,", refusal="no")) == [says("assistant", "well,\nno")]


def test_images_leave_placeholders_and_the_texts_between_them_stay_apart() -> None:
    parts = [
        text("a"),
        text("b"),
        IMAGE,
        text(""),
        {"type": "image_url", "image_url": "data:,one"},
        {"type": "input_image", "image_url": "https://two"},
        {"type": "input_text", "text": "c"},
    ]
    conversation = normalize([says("user", "hi"), says("assistant", "ho"), says("user", parts)])
    assert conversation.messages[2] == says("user", [text("a"), text("b"), PLACE, PLACE, PLACE, text("c")])
    assert conversation.attachments == (
        Image(PIXEL, "messages[2].content[2]", "low"),
        Image("data:,one", "messages[2].content[4]"),
        Image("https://two", "messages[2].content[5]"),
    )


def test_images_come_in_the_order_of_their_placeholders_even_where_hoisting_changed_it() -> None:
    late = {"type": "image_url", "image_url": "data:,late"}
    messages = [says("user", [IMAGE]), says("system", [late])]
    assert [image.url for image in normalize(messages).attachments] == ["data:,late", PIXEL]
    assert [image.url for image in normalize(messages, system_in_place=True).attachments] == [
        PIXEL,
        "data:,late",
    ]


def test_a_placeholder_passes_through_and_counts_as_no_image() -> None:
    message = says("user", [PLACE, text("a"), VIDEO])
    assert normalize([message]) == Conversation([message], ())


def test_a_part_of_unknown_type_is_named_and_not_lost_in_silence() -> None:
    with pytest.raises(ValueError, match=r"'messages\[0\]\.content\[1\]' .* 'audio'"):
        normalize([says("user", [text("a"), {"type": "audio"}])])


# Keys


def test_null_and_empty_keys_are_dropped() -> None:
    message = says(
        "assistant",
        "a",
        name=None,
        tool_calls=[],
        reasoning=None,
        reasoning_content="",
        refusal=None,
        tool_call_id=None,
    )
    assert canonical(message) == [says("assistant", "a")]
    assert canonical(says("assistant", "a", tool_calls=None)) == [says("assistant", "a")]


def test_keys_no_template_knows_are_dropped() -> None:
    marked = says("user", [{**text("a"), "cache_control": {"type": "ephemeral"}}], id="msg_1", metadata={})
    assert canonical(marked) == [says("user", "a")]
    called = says("assistant", "", tool_calls=[{**call("f", "{}"), "index": 0}])
    assert canonical(called) == [says("assistant", "", tool_calls=[call("f", {})])]


def test_a_call_without_an_id_has_no_id() -> None:
    (message,) = canonical(says("assistant", "", tool_calls=[call("f", "{}", None)]))
    assert message["tool_calls"] == [{"type": "function", "function": {"name": "f", "arguments": {}}}]


# Arguments


def test_arguments_become_an_object_in_the_order_of_their_keys() -> None:
    parsed = arguments_of('{"b": [1, 2.5, null, true], "a": {"é": "😀"}}')
    assert parsed == {"b": [1, 2.5, None, True], "a": {"é": "😀"}}
    assert list(parsed) == ["b", "a"]


@pytest.mark.parametrize("absent", [None, "", " \n"])
def test_arguments_that_are_absent_are_an_empty_object(absent: Any) -> None:
    assert arguments_of(absent) == {}


def test_arguments_that_are_an_object_already_are_copied_with_their_nulls() -> None:
    given_object = {"a": {"b": [None, {"c": 1}]}}
    copied = arguments_of(given_object)
    assert copied == given_object
    assert copied["a"]["b"][1] is not given_object["a"]["b"][1]


@pytest.mark.parametrize(
    "unparsed",
    [
        "not JSON",
        '{"cut": "off',
        "[1, 2]",
        '"text"',
        "null",
        '{"a": NaN}',
        '{"a": 1e999}',
        '{"a": -Infinity}',
        '{"a": 18446744073709551616}',
        '{"a": -9223372036854775809}',
        '{"a": ' + "9" * 5000 + "}",
        '{"a": "\\ud800"}',
        '{"\\udfff": 1}',
        '{"a": ' * 100_000,
        '{"a": ' * 100_000 + "1" + "}" * 100_000,
        '{"a": ' + "[" * ARGUMENTS_DEPTH_MAX + "]" * ARGUMENTS_DEPTH_MAX + "}",
    ],
    ids=lambda unparsed: unparsed[:16],
)
def test_arguments_that_are_no_object_to_pass_on_stay_text(unparsed: str) -> None:
    assert arguments_of(unparsed) == unparsed


def test_arguments_at_the_bounds_become_an_object() -> None:
    lists = "[" * (ARGUMENTS_DEPTH_MAX - 1) + "]" * (ARGUMENTS_DEPTH_MAX - 1)
    assert isinstance(arguments_of('{"a": ' + lists + "}"), dict)
    assert arguments_of('{"a": [18446744073709551615, -9223372036854775808], "b": "\\ud83d\\ude00"}') == {
        "a": [2**64 - 1, -(2**63)],
        "b": "😀",
    }


def test_an_object_nested_deeper_than_the_stack_is_copied() -> None:
    root: dict[str, Any] = {}
    leaf = root
    for _ in range(sys.getrecursionlimit() * 2):
        leaf["a"] = leaf = {}
    copied = arguments_of(root)
    depth = 0
    while copied:
        copied, depth = copied["a"], depth + 1
    assert depth == sys.getrecursionlimit() * 2


# What agents send


def test_claude_code_a_system_message_amid_the_turn_is_hoisted_or_left() -> None:
    messages = [
        says("system", [text("You are an agent."), text("Rules."), text("Environment.")]),
        says("user", [text("<reminder>"), text("fix the bug")]),
        says("assistant", [text("Looking.")], tool_calls=[call("Read", '{"path": "a.py"}')]),
        says("tool", [text("1: pass")], tool_call_id="call_1"),
        says("system", "The file changed on disk."),
        says("user", "go on"),
    ]
    rest = [
        says("user", "<reminder>\nfix the bug"),
        says("assistant", "Looking.", tool_calls=[call("Read", {"path": "a.py"})]),
        says("tool", "1: pass", tool_call_id="call_1"),
    ]
    first, late = "You are an agent.\nRules.\nEnvironment.", "The file changed on disk."
    assert canonical(*messages) == [says("system", f"{first}\n\n{late}"), *rest, says("user", "go on")]
    assert canonical(*messages, system_in_place=True) == [
        says("system", first),
        *rest,
        says("system", late),
        says("user", "go on"),
    ]


def test_opencode_two_users_and_an_empty_assistant_with_calls() -> None:
    assert canonical(
        says("system", "You are opencode."),
        says("user", "Generate a title:"),
        says("user", "hello"),
        says("assistant", "", tool_calls=[call("bash", '{"command": "ls"}')]),
        says("tool", "a.py", tool_call_id="call_1"),
    ) == [
        says("system", "You are opencode."),
        says("user", "Generate a title:\n\nhello"),
        says("assistant", "", tool_calls=[call("bash", {"command": "ls"})]),
        says("tool", "a.py", tool_call_id="call_1"),
    ]


def test_qwen_code_parts_in_user_and_tool_content() -> None:
    assert canonical(
        says("system", "You are Qwen Code."),
        says("user", [text("context"), text("task")]),
        says("assistant", None, tool_calls=[call("read", "{}", "1"), call("ls", "{}", "2")]),
        says("tool", [text("one")], tool_call_id="1"),
        says("tool", [text("two"), text("three")], tool_call_id="2"),
    ) == [
        says("system", "You are Qwen Code."),
        says("user", "context\ntask"),
        says("assistant", "", tool_calls=[call("read", {}, "1"), call("ls", {}, "2")]),
        says("tool", "one", tool_call_id="1"),
        says("tool", "two\nthree", tool_call_id="2"),
    ]


def test_pi_null_assistant_content() -> None:
    assert canonical(
        says("user", [text("hi")]),
        says("assistant", None, tool_calls=[call("read", '{"path": "x"}')]),
        says("tool", "x", tool_call_id="call_1"),
    ) == [
        says("user", "hi"),
        says("assistant", "", tool_calls=[call("read", {"path": "x"})]),
        says("tool", "x", tool_call_id="call_1"),
    ]


def test_codex_two_developer_messages() -> None:
    first, second = ([{"type": "input_text", "text": value}] for value in ("one", "two"))
    assert canonical(says("developer", first), says("developer", second), says("user", first)) == [
        says("system", "one\n\ntwo"),
        says("user", "one"),
    ]


@pytest.mark.parametrize("roles", [("user",), ("user", "assistant"), ("system", "user"), ("tool",)])
def test_ten_thousand_messages_take_well_under_a_second(roles: tuple[str, ...]) -> None:
    parts = [text("some words"), IMAGE]
    contents = ["some words " * 10, parts]
    messages = [
        says(roles[index % len(roles)], contents[index // len(roles) % 2], tool_calls=[call("f", '{"a": 1}')])
        for index in range(10_000)
    ]
    start = time.process_time()
    assert len(normalize(messages).attachments) == 5_000
    assert time.process_time() - start < 1


# For every conversation

WORDS = st.text('ab \n"\\{}é\u2028😀', max_size=6)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | WORDS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(WORDS, inner, max_size=3),
    max_leaves=6,
)
ARGUMENTS = (
    st.dictionaries(WORDS, JSON, max_size=3)
    | WORDS
    | st.sampled_from(['{"a": 1}', '{"a": {"b": [null]}}', '{"a": NaN}', "[1]", "", "{", '{"a": "\\udc00"}'])
)
CALLS = st.builds(call, WORDS, ARGUMENTS, st.none() | WORDS)
URLS = st.integers(0, 99).map("data:,{}".format)
PARTS = st.one_of(
    st.builds(
        lambda type, text: {"type": type, "text": text}, st.sampled_from(["text", "input_text"]), WORDS
    ),
    st.builds(lambda refusal: {"type": "refusal", "refusal": refusal}, WORDS),
    st.builds(lambda url: {"type": "image_url", "image_url": {"url": url, "detail": "auto"}}, URLS),
    st.builds(lambda url: {"type": "image_url", "image_url": url}, URLS),
    st.builds(lambda url: {"type": "input_image", "image_url": url}, URLS),
    st.builds(lambda url: {"type": "video_url", "video_url": {"url": url}}, URLS),
    st.builds(lambda urls: {"type": "video", "video": urls}, URLS | st.lists(URLS, min_size=1, max_size=3)),
)
CONTENTS = st.none() | WORDS | st.lists(PARTS, max_size=4)
OPTIONAL_TEXT = st.none() | WORDS
MESSAGES = st.one_of(
    st.fixed_dictionaries(
        {"role": st.sampled_from(["system", "developer", "user"])},
        optional={"content": CONTENTS, "name": st.sampled_from([None, "", "ann", "bob"])},
    ),
    st.fixed_dictionaries(
        {"role": st.just("assistant")},
        optional={
            "content": CONTENTS,
            "name": st.sampled_from([None, "ann"]),
            "refusal": OPTIONAL_TEXT,
            "reasoning": OPTIONAL_TEXT,
            "reasoning_content": OPTIONAL_TEXT,
            "tool_calls": st.none() | st.lists(CALLS, max_size=3),
        },
    ),
    st.fixed_dictionaries(
        {"role": st.sampled_from(["tool", "function"])},
        optional={"content": CONTENTS, "name": OPTIONAL_TEXT, "tool_call_id": OPTIONAL_TEXT},
    ),
)
CONVERSATIONS = st.lists(MESSAGES, max_size=8)
ROLES = {"developer": "system", "function": "tool"}


def texts_in(message: dict[str, Any]) -> list[str]:
    content = message.get("content") or []
    parts = [text(content)] if isinstance(content, str) else content
    said = [part.get("text") or part.get("refusal") or "" for part in parts]
    return [words for words in [*said, message.get("refusal")] if words]


def urls_in(message: dict[str, Any]) -> list[str]:
    content = message.get("content") or []
    found: list[str] = []
    for part in content if isinstance(content, list) else []:
        told = part.get("image_url") or part.get("video_url") or part.get("video") or []
        told = told["url"] if isinstance(told, dict) else told
        found += [told] if isinstance(told, str) else told
    return found


def urls_of(conversation: Conversation) -> list[str]:
    return [url for each in conversation.attachments for url in urls_in_one(each)]


def urls_in_one(attachment: Attachment) -> tuple[str, ...]:
    return (attachment.url,) if isinstance(attachment, Image) else attachment.urls


def occur_in_order(needles: list[str], haystack: str) -> bool:
    position = 0
    for needle in needles:
        found = haystack.find(needle, position)
        if found < 0:
            return False
        position = found + len(needle)
    return True


def containers_in(value: Any) -> list[Any]:
    """Return every dict and list within `value`, arguments included."""
    inner = list(value.values()) if isinstance(value, dict) else value if isinstance(value, list) else None
    return [] if inner is None else [value, *(found for item in inner for found in containers_in(item))]


@given(CONVERSATIONS, st.booleans(), st.booleans())
def test_normalizing_twice_is_normalizing_once(
    messages: list[dict[str, Any]], system_in_place: bool, in_place_again: bool
) -> None:
    once = normalize(messages, system_in_place=system_in_place)
    twice = normalize(once.messages, system_in_place=system_in_place)
    assert twice == Conversation(once.messages, ())
    hoisted = normalize(messages).messages
    assert normalize(hoisted, system_in_place=in_place_again).messages == hoisted


@given(CONVERSATIONS, st.booleans())
def test_the_input_is_neither_changed_nor_shared(
    messages: list[dict[str, Any]], system_in_place: bool
) -> None:
    before = deepcopy(messages)
    output = normalize(messages, system_in_place=system_in_place).messages
    ours = {id(container) for container in containers_in(output)}
    assert ours.isdisjoint(id(container) for container in containers_in(messages))
    assert messages == before


@given(CONVERSATIONS, st.booleans())
def test_every_text_is_kept_in_order_within_its_role(
    messages: list[dict[str, Any]], system_in_place: bool
) -> None:
    output = normalize(messages, system_in_place=system_in_place).messages
    for role in ("system", "user", "assistant", "tool"):
        sent = [
            words
            for message in messages
            if ROLES.get(message["role"], message["role"]) == role
            for words in texts_in(message)
        ]
        kept = [words for message in output if message["role"] == role for words in texts_in(message)]
        assert occur_in_order(sent, "\n".join(kept))


@given(CONVERSATIONS, st.booleans())
def test_every_image_and_video_has_one_placeholder_and_says_where_it_stood(
    messages: list[dict[str, Any]], system_in_place: bool
) -> None:
    conversation = normalize(messages, system_in_place=system_in_place)
    ordered = list(messages)
    if not system_in_place:
        ordered.sort(key=lambda message: message["role"] not in ("system", "developer"))
    assert urls_of(conversation) == [url for m in ordered for url in urls_in(m)]
    contents = [message["content"] for message in conversation.messages]
    parts = [part for content in contents if isinstance(content, list) for part in content]
    places = [Image if part == PLACE else Video for part in parts if part in (PLACE, VIDEO)]
    assert places == [type(attachment) for attachment in conversation.attachments]
    for attachment in conversation.attachments:
        at, part = (int(number.split("]")[0]) for number in attachment.param.split("[")[1:])
        assert [*urls_in_one(attachment)] == urls_in({"content": [messages[at]["content"][part]]})


@given(CONVERSATIONS, st.booleans())
def test_every_tool_call_and_result_is_kept_in_order(
    messages: list[dict[str, Any]], system_in_place: bool
) -> None:
    output = normalize(messages, system_in_place=system_in_place).messages
    sent = [call for message in messages for call in message.get("tool_calls") or []]
    kept = [call for message in output for call in message.get("tool_calls", [])]
    assert [(c["id"] or None, c["function"]["name"]) for c in sent] == [
        (c.get("id"), c["function"]["name"]) for c in kept
    ]
    results = [message for message in messages if message["role"] in ("tool", "function")]
    assert [message.get("tool_call_id") or None for message in results] == [
        message.get("tool_call_id") for message in output if message["role"] == "tool"
    ]


@given(CONVERSATIONS)
def test_the_one_system_message_stands_first(messages: list[dict[str, Any]]) -> None:
    roles = [message["role"] for message in normalize(messages).messages]
    assert "system" not in roles[1:]


@given(CONVERSATIONS, st.booleans())
def test_no_neighbours_share_role_and_name(messages: list[dict[str, Any]], system_in_place: bool) -> None:
    output = normalize(messages, system_in_place=system_in_place).messages
    speakers = [(message["role"], message.get("name")) for message in output]
    assert all(one != other or one[0] == "tool" for one, other in pairwise(speakers))


@given(CONVERSATIONS, st.booleans())
def test_normalized_messages_have_no_nulls_and_content_is_string_or_media(
    messages: list[dict[str, Any]], system_in_place: bool
) -> None:
    for message in normalize(messages, system_in_place=system_in_place).messages:
        assert message.keys() <= {
            "role",
            "content",
            "name",
            "reasoning_content",
            "tool_calls",
            "tool_call_id",
        }
        assert all(value for key, value in message.items() if key != "content")
        assert isinstance(message["content"], str) or {"image", "video"} & {
            p["type"] for p in message["content"]
        }
        for called in message.get("tool_calls", []):
            assert called.keys() | {"id"} == {"id", "type", "function"}
            assert None not in called.values()
            assert None not in called["function"].values()
