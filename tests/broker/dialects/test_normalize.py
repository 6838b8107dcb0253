import json
import time
from copy import deepcopy
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from broker.dialects.normalize import VOLATILE_HEADS, Conversation, normalize, without_volatile
from broker.dialects.parts import Attachment, Image, Video
from protocol.arguments import ARGUMENTS_DEPTH_MAX

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


# Messages

FUNCTION_CALL = {"name": "now", "arguments": "{}"}
CANONICAL_CALL = {"type": "function", "function": {"name": "now", "arguments": {}}}
FIRST_CALL = says("assistant", "a", reasoning="r", reasoning_content="r", tool_calls=[call("f", "{}")])
SECOND_CALL = says(
    "assistant", None, reasoning_content="two", tool_calls=[call("g", "{}", "2") | {"index": 0}]
)
BOTH_CALLS = [call("f", {}), call("g", {}, "2")]
MARKED = {**text("a"), "cache_control": {"type": "ephemeral"}}
TEXT_PARTS = [text("a"), text(""), {"type": "input_text", "text": "b"}, {"type": "output_text", "text": "c"}]

CANONICAL: dict[str, tuple[list[dict[str, Any]], list[dict[str, Any]]]] = {
    "a function's result is a tool's, and its call a tool call": (
        [says("assistant", None, function_call=FUNCTION_CALL), says("function", "noon", name="now")],
        [says("assistant", "", tool_calls=[CANONICAL_CALL]), says("tool", "noon", name="now")],
    ),
    "a late system message is hoisted": (
        [says("system", "one"), says("user", "a"), says("developer", "two"), says("user", "b")],
        [says("system", "one\n\ntwo"), says("user", "a\n\nb")],
    ),
    "a late system message is text of the turn that it follows": (
        [
            says("system", "one"),
            says("user", "a"),
            says("system", "two"),
            FIRST_CALL,
            says("tool", "noon", tool_call_id="call_1"),
            says("system", "three"),
            SECOND_CALL,
            says("tool", [IMAGE], tool_call_id="2"),
            says("system", "four"),
            says("system", [text("five")]),
            says("assistant", "b"),
            says("user", "c", name="bob"),
            says("developer", "six"),
        ],
        [
            says("system", "one\n\ntwo"),
            says("user", "a"),
            says("assistant", "a", reasoning_content="r", tool_calls=BOTH_CALLS[:1]),
            says("tool", "noon\n\nthree", tool_call_id="call_1"),
            says("assistant", "", reasoning_content="two", tool_calls=BOTH_CALLS[1:]),
            says("tool", [PLACE, text("four\n\nfive")], tool_call_id="2"),
            says("assistant", "b"),
            says("user", "c\n\nsix", name="bob"),
        ],
    ),
    "or of the turn that it precedes": (
        [
            says("assistant", "a"),
            says("system", "one"),
            says("user", "b", name="bob"),
            FIRST_CALL,
            says("system", "two"),
            says("tool", "noon", tool_call_id="call_1"),
            says("assistant", "c"),
            says("system", "three"),
            says("system", "four"),
        ],
        [
            says("assistant", "a"),
            says("user", "one\n\nb", name="bob"),
            says("assistant", "a", reasoning_content="r", tool_calls=BOTH_CALLS[:1]),
            says("tool", "two\n\nnoon", tool_call_id="call_1"),
            says("assistant", "c"),
            says("user", "three\n\nfour"),
        ],
    ),
    "users of different names stay apart": (
        [says("user", "a", name="bob"), says("user", "b", name="bob"), says("user", ""), says("user", "c")],
        [says("user", "a\n\nb", name="bob"), says("user", "c")],
    ),
    "joined messages keep every call and all reasoning once": (
        [FIRST_CALL, SECOND_CALL],
        [says("assistant", "a", reasoning_content="r\n\ntwo", tool_calls=BOTH_CALLS)],
    ),
    "a string beside parts becomes a part": (
        [says("user", content) for content in ("a", "b", [IMAGE, text("c")], "d", "")],
        [says("user", [text("a\n\nb"), PLACE, text("c"), text("d")])],
    ),
    "no parts": ([says("user", [])], [says("user", "")]),
    "text parts are lines": ([says("user", TEXT_PARTS)], [says("user", "a\nb\nc")]),
    "a refusal as a field": ([says("assistant", "well,", refusal="no")], [says("assistant", "well,\nno")]),
    "keys that no template knows": ([says("user", [MARKED], id="msg_1", metadata={})], [says("user", "a")]),
}


@pytest.mark.parametrize(("messages", "expected"), CANONICAL.values(), ids=CANONICAL)
def test_each_form_of_a_message_becomes_the_canonical_one(messages: list[Any], expected: list[Any]) -> None:
    assert canonical(*messages) == expected


def test_a_late_system_message_stays_where_the_template_takes_it() -> None:
    late = [says("system", "one"), says("user", "a"), says("system", "two"), says("system", "three")]
    assert canonical(*late, says("user", "b"), system_in_place=True) == [
        *late[:2], says("system", "two\n\nthree"), says("user", "b"),
    ]  # fmt: skip


# Images


def test_images_leave_placeholders_and_the_texts_between_them_stay_apart() -> None:
    urls = {"type": "image_url", "image_url": "data:,1"}, {"type": "input_image", "image_url": "https://2"}
    parts = [text("a"), text("b"), IMAGE, text(""), *urls, text("c")]
    conversation = normalize([says("user", "hi"), says("assistant", "ho"), says("user", parts)])
    assert conversation.messages[2] == says("user", [text("a"), text("b"), *[PLACE] * 3, text("c")])
    assert conversation.attachments == (
        Image(PIXEL, "messages[2].content[2]", "low"),
        Image("data:,1", "messages[2].content[4]"),
        Image("https://2", "messages[2].content[5]"),
    )


def test_a_part_of_unknown_type_is_named_and_not_lost_in_silence() -> None:
    with pytest.raises(ValueError, match=r"'messages\[0\]\.content\[1\]' .* 'audio'"):
        normalize([says("user", [text("a"), {"type": "audio"}])])


# Arguments


def test_arguments_become_an_object_in_the_order_of_their_keys() -> None:
    parsed = arguments_of('{"b": [1, 2.5, null, true], "a": {"é": "😀"}}')
    assert parsed == {"b": [1, 2.5, None, True], "a": {"é": "😀"}}
    assert list(parsed) == ["b", "a"]
    assert [arguments_of(absent) for absent in (None, "", " \n")] == [{}, {}, {}]


@pytest.mark.parametrize(
    "unparsed",
    [
        '{"cut": "off', "null", '{"a": 1e999}', '{"a": 18446744073709551616}',
        '{"a": ' + "9" * 5000 + "}", '{"a": "\\ud800"}', '{"a": ' * 100_000 + "1" + "}" * 100_000,
        '{"a": ' + "[" * ARGUMENTS_DEPTH_MAX + "]" * ARGUMENTS_DEPTH_MAX + "}",
    ],
    ids=lambda unparsed: unparsed[:16],
)  # fmt: skip
def test_arguments_that_are_no_object_to_pass_on_stay_text(unparsed: str) -> None:
    assert arguments_of(unparsed) == unparsed


def test_arguments_at_the_bounds_become_an_object() -> None:
    lists = "[" * (ARGUMENTS_DEPTH_MAX - 1) + "]" * (ARGUMENTS_DEPTH_MAX - 1)
    assert isinstance(arguments_of('{"a": ' + lists + "}"), dict)
    assert arguments_of('{"a": [18446744073709551615, -9223372036854775808], "b": "\\ud83d\\ude00"}') == {
        "a": [2**64 - 1, -(2**63)],
        "b": "😀",
    }


@pytest.mark.parametrize("value", [10**30, float("inf"), "\ud83d", [[]] * 2])
def test_an_object_that_the_wire_cannot_carry_is_its_text(value: Any) -> None:
    nested = value
    for _ in range(ARGUMENTS_DEPTH_MAX * isinstance(value, list)):
        nested = [nested]
    assert arguments_of({"a": nested}) == json.dumps({"a": nested})


@pytest.mark.parametrize("roles", [("user", "assistant"), ("system", "user"), ("assistant", "system")])
def test_time_is_proportional_to_the_number_of_messages(roles: tuple[str, ...]) -> None:
    contents = ["some words " * 10, [text("some words"), IMAGE]]

    def seconds(count: int) -> float:
        messages = [
            says(roles[n % len(roles)], contents[n // len(roles) % 2], tool_calls=[call("f", '{"a": 1}')])
            for n in range(count)
        ]
        times = []
        for _ in range(3):
            start = time.thread_time()
            assert len(normalize(messages).attachments) == count // 2
            times.append(time.thread_time() - start)
        return min(times)

    assert seconds(2000) < 10 * seconds(500)


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
            "content": CONTENTS, "name": st.sampled_from([None, "ann"]), "refusal": OPTIONAL_TEXT,
            "reasoning": OPTIONAL_TEXT, "reasoning_content": OPTIONAL_TEXT,
            "tool_calls": st.none() | st.lists(CALLS, max_size=3),
        },
    ),
    st.fixed_dictionaries(
        {"role": st.sampled_from(["tool", "function"])},
        optional={"content": CONTENTS, "name": OPTIONAL_TEXT, "tool_call_id": OPTIONAL_TEXT},
    ),
)  # fmt: skip
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


def urls_in_one(attachment: Attachment) -> tuple[str, ...]:
    return (attachment.url,) if isinstance(attachment, Image) else attachment.urls


def occur_in_order(needles: list[str], haystack: str) -> bool:
    for needle in needles:
        _, found, haystack = haystack.partition(needle)
        if not found:
            return False
    return True


def containers_in(value: Any) -> list[Any]:
    """Return every dict and list within `value`, arguments included."""
    inner = list(value.values()) if isinstance(value, dict) else value if isinstance(value, list) else None
    return [] if inner is None else [value, *(found for item in inner for found in containers_in(item))]


@settings(max_examples=80)
@given(CONVERSATIONS, st.booleans())
def test_any_conversation_is_kept_in_order_in_the_form_of_templates(
    messages: list[dict[str, Any]], system_in_place: bool
) -> None:
    before = deepcopy(messages)
    conversation = normalize(messages, system_in_place=system_in_place)
    again = normalize(conversation.messages, system_in_place=system_in_place)
    assert again == Conversation(conversation.messages, ())
    ours = {id(container) for container in containers_in(conversation.messages)}
    assert ours.isdisjoint(id(container) for container in containers_in(messages))
    assert messages == before
    assert_texts_are_kept(messages, conversation.messages)
    assert_calls_are_kept(messages, conversation.messages)
    assert_media_are_in_place(messages, conversation, system_in_place)
    assert_canonical(conversation.messages, system_in_place)


def assert_texts_are_kept(messages: list[dict[str, Any]], output: list[dict[str, Any]]) -> None:
    """Assert that every text of a role is there, in order: those of the system in any turn."""
    for role in ("system", "user", "assistant", "tool"):
        of_role = [one for one in messages if ROLES.get(one["role"], one["role"]) == role]
        given_texts = [words for message in of_role for words in texts_in(message)]
        places = [message for message in output if role in ("system", message["role"])]
        texts = [words for message in places for words in texts_in(message)]
        assert occur_in_order(given_texts, "\n".join(texts))


def assert_calls_are_kept(messages: list[dict[str, Any]], output: list[dict[str, Any]]) -> None:
    calls = [call for message in messages for call in message.get("tool_calls") or []]
    assert [(call["id"] or None, call["function"]["name"]) for call in calls] == [
        (call.get("id"), call["function"]["name"])
        for message in output
        for call in message.get("tool_calls", [])
    ]
    results = [message for message in messages if message["role"] in ("tool", "function")]
    assert [message.get("tool_call_id") or None for message in results] == [
        message.get("tool_call_id") for message in output if message["role"] == "tool"
    ]


def assert_media_are_in_place(
    messages: list[dict[str, Any]], conversation: Conversation, system_in_place: bool
) -> None:
    """Assert that each image and video has one placeholder, and names where it was sent."""
    ordered = list(messages)
    if not system_in_place:
        roles = [message["role"] for message in messages]
        answered = roles.index("assistant") if "assistant" in roles else len(roles)
        ordered[:answered] = sorted(
            ordered[:answered], key=lambda message: message["role"] not in ("system", "developer")
        )
    urls = [url for each in conversation.attachments for url in urls_in_one(each)]
    assert urls == [url for message in ordered for url in urls_in(message)]
    contents = [message["content"] for message in conversation.messages]
    parts = [part for content in contents if isinstance(content, list) for part in content]
    places = [Image if part == PLACE else Video for part in parts if part in (PLACE, VIDEO)]
    assert places == [type(attachment) for attachment in conversation.attachments]
    for attachment in conversation.attachments:
        at, part = (int(number.split("]")[0]) for number in attachment.param.split("[")[1:])
        assert [*urls_in_one(attachment)] == urls_in({"content": [messages[at]["content"][part]]})


def assert_canonical(output: list[dict[str, Any]], system_in_place: bool) -> None:
    """Assert that there are no nulls, no neighbours of one speaker, and one system message at the start."""
    roles = [message["role"] for message in output]
    assert system_in_place or "system" not in roles[1:]
    speakers = [(message["role"], message.get("name")) for message in output]
    assert all(one != other or one[0] == "tool" for one, other in pairwise(speakers))
    for message in output:
        assert message.keys() <= {
            "role", "content", "name", "reasoning_content", "tool_calls", "tool_call_id",
        }  # fmt: skip
        assert all(value for key, value in message.items() if key != "content")
        media = {"image", "video"}
        assert isinstance(message["content"], str) or media & {p["type"] for p in message["content"]}
        for called in message.get("tool_calls", []):
            assert called.keys() | {"id"} == {"id", "type", "function"}
            assert None not in called.values()
            assert None not in called["function"].values()


# As Claude Code 2.1 sends it, to Anthropic and to other servers.
BILLING = "x-anthropic-billing-header: cc_version=2.1.330.fe5; cc_entrypoint=sdk-cli; cch=a1b2c;"
LATER = "x-anthropic-billing-header: cc_version=2.1.330.c62; cc_entrypoint=sdk-cli; cch=00000;"
PROMPT = "You are an agent.\n\nx-anthropic-billing-header: is a name that I mention."

TEXTS = st.lists(
    st.sampled_from(
        [*VOLATILE_HEADS, BILLING, "\n", "\n\n", "You are", " ", "x-anthropic", "x-anthropic-billing: y"]
    )
).map("".join)


def system(*contents: Any) -> list[dict[str, Any]]:
    messages = [{"role": "system", "content": content} for content in contents]
    return normalize([*messages, {"role": "user", "content": "Hi"}]).messages


@pytest.mark.parametrize(
    "told",
    [
        (f"{BILLING}\n{PROMPT}",),
        (f"{BILLING}\n{LATER}\n{PROMPT}",),
        ([text(BILLING), text(PROMPT)],),
        (BILLING, PROMPT),
    ],
)
def test_the_prompt_is_that_of_a_request_without_the_line(told: tuple[Any, ...]) -> None:
    assert system(*told) == system(PROMPT)


COUNTER = "<total_tokens>14999841 tokens left</total_tokens>"
"""As Claude Code 2.1.233 and later send it, behind each turn and now and then in the system prompt."""
REMINDER = f"<system-reminder>\n{COUNTER}\n</system-reminder>"


@pytest.mark.parametrize(
    "told",
    [
        (f"{PROMPT}\n{COUNTER}",), (PROMPT, COUNTER), ([text(PROMPT), text(REMINDER)],),
        (f"{COUNTER}\n{BILLING}\n{PROMPT}\n\n{REMINDER}",), (f"{BILLING}\n{COUNTER}\n{PROMPT}",),
    ],
)  # fmt: skip
def test_no_system_message_counts_the_tokens_that_are_left(told: tuple[Any, ...]) -> None:
    assert system(*told) == system(PROMPT)


def test_text_about_counters_stays() -> None:
    for kept in (f"Write {COUNTER}", f"{COUNTER}!", "<total_tokens>many tokens left</total_tokens>"):
        assert system(f"{PROMPT}\n{kept}") == [says("system", f"{PROMPT}\n{kept}"), says("user", "Hi")]
    assert canonical(says("user", COUNTER)) == [says("user", COUNTER)]
    blank = "\n" * 1_000_000 + "x"  # read once, not once for each line
    assert system(blank) == [says("system", blank), says("user", "Hi")]


def test_each_turn_of_an_agent_begins_with_the_one_before() -> None:
    """Behind each of its turns the agent sends a counter, now and then a reminder."""
    spoken = [says("system", f"{BILLING}\n{PROMPT}"), says("user", "Go."), says("system", "# Environment")]
    before = canonical(*spoken)
    for turn in range(8):
        spoken += [
            says("assistant", "", tool_calls=[call("f", "{}", f"call_{turn}")]),
            says("tool", f"result {turn}", tool_call_id=f"call_{turn}"),
            says("system", COUNTER.replace("41", str(turn))),
        ]
        spoken += [says("system", f"Mind your tasks: {turn}.")] * (turn % 3 == 0)
        now = canonical(*spoken)
        assert now[: len(before)] == before
        assert ("Mind" in now[-1]["content"]) == (turn % 3 == 0)
        before = now


def test_other_text_is_left_unchanged() -> None:
    assert without_volatile(f" {BILLING}\n{PROMPT}") == f" {BILLING}\n{PROMPT}"
    user = {"role": "user", "content": f"{BILLING}\nWhat is this?"}
    assert normalize([user]).messages == [user]
    assert system(BILLING) == system([text(BILLING)]) == system()
    assert system("") != system()


@given(TEXTS)
def test_stripped_text_is_a_suffix_without_volatile_head(text: str) -> None:
    left = without_volatile(text)
    assert text.endswith(left)
    assert not left.startswith(VOLATILE_HEADS)
    assert without_volatile(left) == left
