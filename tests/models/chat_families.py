"""Chat families that people run: what their templates do with a history, and an answer as each writes it.

A template here has the constructs of the published one that decide what of a history reaches the model.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from tests.worker.output.calls.test_families import CALLS, CALLS_END, r1, v3
from tests.worker.output.calls.written import FORMATS

NAME, ARGUMENTS = "get_weather", {"city": "Quito", "days": 3}
THOUGHT, BESIDE = "I must look it up.", "I will look."
_SPECIAL = re.compile(
    r"<\|[^<>|]+\|?>|<[a-z_]+\|>|<｜(?!DSML)[^｜]+｜>|<SPECIAL_..>|<\w+_turn>|\]~b\]|\[/?[A-Z_]{4,}\]"
)
_WORDS = re.compile(r"</?(?:\w+:)?(?:think|tool_call|arg_key|arg_value|response)>|｜DSML｜")
_TEMPLATE = (
    "{% for m in messages %}{% set role = m.role %}GUARD{% if 'RESULT' and role == 'tool' %}RESULT"
    "{% elif 'CALL' and role == 'assistant' and (CALLED) %}BEFORETHOUGHTBESIDE"
    "{% for c in m.tool_calls %}{% set f = c.function %}CALL{% endfor %}AFTER"
    "{% else %}BEFORETHOUGHT{{ m.content }}AFTER{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{% set role = 'assistant' %}BEFOREOPENS{% endif %}"
)


@dataclass(frozen=True)
class Family:
    """A family of models. `turn`, `call`, `result`, `thought`: how its template writes them. `writes`: its
    own call, behind `said`, an answer around its thought (`{0}`) and text (`{1}`). `is_plain`: its tags are
    text. `is_bare`: a call is a whole answer. `omits`: what the published template has no place for."""

    turn: str
    writes: str
    call: str = ""
    said: str = "{1}"
    result: str = ""
    thought: str = ""
    opens: str = ""
    called: str = "m.tool_calls"
    beside: str = "{{ m.content or '' }}"
    head: str = ""
    guard: str = ""
    own: str = ""
    is_plain: bool = False
    is_bare: bool = False
    omits: str = ""

    @property
    def tokens(self) -> tuple[list[str], list[str]]:
        """Its special tokens, and those that are text."""
        text = self.turn + self.own + self.writes + self.said
        return _SPECIAL.findall(text), [] if self.is_plain else _WORDS.findall(text)

    @property
    def template(self) -> str:
        """Its template, or the name of upstream's renderer."""
        before, _, after = self.turn.replace("ROLE", "{{ role }}").partition("TEXT")
        parts = {"CALLED": self.called, "BEFORE": before, "AFTER": after}
        parts |= {"CALL": self.call, "BESIDE": self.beside, "THOUGHT": self.thought, "RESULT": self.result}
        text = self.own or _TEMPLATE
        for name, part in {**parts, "GUARD": self.guard, "OPENS": self.opens}.items():
            text = text.replace(f"'{name}'", str(bool(part))).replace(name, part)
        tools = "" if self.omits == "tools" or self.own else "{{ tools|tojson if tools }}"
        return self.head + tools + text


def _items(text: str, items: str = "f.arguments.items()") -> str:
    return "{% for k, v in " + items + " %}" + text + "{% endfor %}"


def _if(name: str, text: str) -> str:
    return "{% if m." + name + " %}" + text.replace("IT", "{{ m." + name + " }}") + "{% endif %}"


def _raises(condition: str, message: str) -> str:
    return "{% if " + condition + " %}{{ raise_exception('" + message + "') }}{% endif %}"


_JSON = '{"city": "Quito", "days": 3}'
_OBJECT = '{"name": "get_weather", "arguments": ' + _JSON + "}"
_WRITTEN = {name: form.write([(NAME, ARGUMENTS)]) for name, form in FORMATS.items() if NAME in form.names}
_TAGS, _HEADS = _WRITTEN["glm47"], _WRITTEN["mistral"]
_HERMES, _XML, _CODE = _WRITTEN["json_tools"], _WRITTEN["qwen3_coder"], _WRITTEN["pythonic"][19:-17]
_LLAMA, _LLAMA_4 = _OBJECT.replace("arguments", "parameters"), f"<|python_start|>{_CODE}<|python_end|>"
_CHATML, _ROLES = "<|im_start|>ROLE\nTEXT<|im_end|>\n", "<|start_of_role|>ROLE<|end_of_role|>TEXT"
_THINKS, _THOUGHT = "<think>\n{0}\n</think>\n\n{1}", _if("reasoning_content", "<think>\nIT\n</think>\n\n")
_RIGHT, _NEAR = "<think>{0}</think>{1}", _if("reasoning_content", "<think>IT</think>")
_RESULT = "<tool_response>\n{{ m.content }}\n</tool_response>"
_OBJECTS = '{"name": "{{ f.name }}", "arguments": {{ f.arguments|tojson }}}'
_JSON_CALL = f"\n<tool_call>\n{_OBJECTS}\n</tool_call>"
_PARAMETERS = _items("<parameter={{ k }}>\n{{ v }}\n</parameter>\n", "f.arguments|items")
_XML_CALL = "<tool_call>\n<function={{ f.name }}>\n" + _PARAMETERS + "</function>\n</tool_call>"
_ALTERNATE = _raises("(role == 'user') != (loop.index0 % 2 == 0)", "roles must alternate")
_FIRST = _raises("role == 'system' and not loop.first", "System message must be at the beginning.")
_NEEDS = _raises("not messages|selectattr('role', 'equalto', 'user')|list", "No user query found")
_USERS = "{{ {'user': '<｜User｜>', 'assistant': '<｜Assistant｜>'}[role] }}TEXT<｜end▁of▁sentence｜>"
_R1, _SAYS_R1 = r1("{{ f.name }}", "{{ '' + f.arguments }}"), CALLS + r1(NAME, _JSON) + CALLS_END
_V3, _SAYS_V3 = v3("{{ f.name }}", "{{ '' + f.arguments }}"), CALLS + v3(NAME, _JSON) + CALLS_END
_DSML = (
    '\n\n<｜DSML｜{0}>\n<｜DSML｜invoke name="get_weather">\n'
    '<｜DSML｜parameter name="city" string="true">Quito</｜DSML｜parameter>\n'
    '<｜DSML｜parameter name="days" string="false">3</｜DSML｜parameter>\n</｜DSML｜invoke>\n</｜DSML｜{0}>'
)
_DSML_CALL = '<｜DSML｜invoke name="{{ f.name }}">' + _items('<｜DSML｜parameter name="{{ k }}">{{ v }}')
_GLM, _K3 = "{{ f.name }}" + _items("<arg_key>{{ k }}{{ v }}"), "<|open|>{0}<|sep|>{1}<|close|>{0}<|sep|>"
_K3_CALL = '<|open|>call tool="{{ f.name }}"<|sep|>' + _items('<|open|>key="{{ k }}"<|sep|>{{ v }}')
_PYTHONIC = "{{ f.name }}(" + _items("{{ k }}={{ v|tojson }}, ") + ")\n"
_TURN_GEMMA = "<start_of_turn>ROLE\nTEXT<end_of_turn>\n"
_INST = "{{ {'user': '[INST]', 'system': '[SYSTEM_PROMPT]'}[role] }}TEXT"
_SPACE = "{% set ns = namespace(n=0) %}"
_TURNS = "{% if role == 'user' or (role == 'assistant' and m.tool_calls is undefined) %}"
_TURNS += _ALTERNATE.replace("loop.index0", "ns.n") + "{% set ns.n = ns.n + 1 %}{% endif %}"
_NINE = _raises("c.id is undefined or c.id|length != 9", "Tool call IDs should have length 9!")
_ARGS = "[TOOL_CALLS]{{ f.name }}[ARGS]{{ f.arguments|tojson }}"
_BLOCKS = (
    "{% if m.content is string %}{{ m.content }}{% else %}{% for b in m.content %}"
    "{{ '[THINK]' + b.thinking + '[/THINK]' if b.type == 'thinking' else b.text }}{% endfor %}{% endif %}"
)
_LATER = "messages[loop.index:]|selectattr('role', 'equalto', 'assistant')|rejectattr('tool_calls')|list"
_BOTH = _raises("m.content and m.thinking", "Cannot pass both content and thinking with tool calls!")
_HARMONY = (  # drops thoughts of finished turns
    "{{ tools|tojson }}{% for m in messages %}{% if m.tool_calls %}{% set f = m.tool_calls[0].function %}BOTH"
    "{% set said = m.content or m.thinking %}"
    "{% if said and not LATER %}<|channel|>analysis<|message|>{{ said }}<|end|>{% endif %}"
    "<|start|>assistant to=functions.{{ f.name }}<|message|>{{ f.arguments|tojson }}<|call|>"
    "{% else %}<|start|>{{ m.role }}<|message|>{{ m.content }}<|end|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant{% endif %}"
)
_TO = "<|end|><|start|>assistant<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>"
_FINAL = "<|channel|>analysis<|message|>{0}<|end|><|start|>assistant<|channel|>final<|message|>{1}"

FAMILIES = {
    "Qwen 2.5": Family(_CHATML, _HERMES, _JSON_CALL, result=_RESULT),
    "Qwen 3": Family(_CHATML, _HERMES, _JSON_CALL, _THINKS, _RESULT, _THOUGHT),
    "Qwen 3.5 to 3.8": Family(_CHATML, _XML, _XML_CALL, _THINKS, _RESULT, _THOUGHT, "<think>\n", head=_NEEDS,
        guard=_FIRST),
    "Qwen-Coder": Family(_CHATML, _XML, _XML_CALL, result=_RESULT),
    "gpt-oss": Family("", f"{_TO}{_JSON}<|call|>", said=_FINAL,
        own=_HARMONY.replace("LATER", _LATER).replace("BOTH", _BOTH)),
    "DeepSeek R1": Family(_USERS, _SAYS_R1, _R1, _THINKS, _RESULT, opens="<think>\n", omits="tools"),
    "DeepSeek V3": Family(
        _USERS, _SAYS_R1, _R1, result=_RESULT, called="m.content is none", beside="", omits="tools"),
    "DeepSeek V3.1": Family(_USERS, _SAYS_V3, _V3, _RIGHT, _RESULT, omits="tools",
        opens="{{ '<think>' if thinking else '</think>' }}"),
    "DeepSeek V3.2": Family(_USERS, _DSML.format("function_calls"), said=_RIGHT, own="deepseek_v32"),
    "DeepSeek V4": Family(_USERS, _DSML.format("tool_calls"), _DSML_CALL, _RIGHT, _RESULT, _NEAR, "<think>"),
    "GLM 4.5": Family("<|ROLE|>\nTEXT", _TAGS, _GLM, "\n<think>{0}</think>\n{1}\n", _RESULT, _NEAR),
    "GLM 4.7, 5": Family("<|ROLE|>TEXT", _TAGS.replace("\n", ""), _GLM, _RIGHT, _RESULT, _NEAR, "<think>"),
    "Kimi K2": Family("<|im_ROLE|><|im_middle|>TEXT<|im_end|>", _WRITTEN["kimi_k2"].replace(":2<", ":0<"),
        "<|tool_call_begin|>{{ c.id }}<|tool_call_argument_begin|>{{ f.arguments|tojson }}<|tool_call_end|>",
        _RIGHT, "## Return of {{ m.tool_call_id }}\n{{ m.content }}<|im_end|>", _NEAR),
    "Kimi K3": Family(_K3.format("message", "TEXT") + "<|end_of_msg|>", _WRITTEN["kimi_k3"], _K3_CALL,
        _K3.format("think", "{0}") + _K3.format("response", "{1}"), "<|open|>tool<|sep|>{{ m.content }}",
        _if("reasoning_content", _K3.format("think", "IT")), "<|open|>think<|sep|>"),
    "MiniMax M2": Family("]~b]ROLE\nTEXT[e~[\n", _WRITTEN["minimax_m2"],
        '<invoke name="{{ f.name }}">\n' + _items('<parameter name="{{ k }}">{{ v }}</parameter>\n'), _THINKS,
        "<response>{{ m.content }}</response>", _THOUGHT, "<think>\n"),
    "MiniMax M3": Family(
        "]~b]ROLE\nTEXT[e~[\n", '<tool_call>\n<invoke name="get_weather">\n<city>Quito</city>\n'
        "<days>3</days>\n</invoke></tool_call>", '<invoke name="{{ f.name }}">' + _items("<{{ k }}>{{ v }}"),
        "<mm:think>{0}</mm:think>{1}", _RESULT, _if("reasoning_content", "<mm:think>IT</mm:think>")),
    "Gemma 2": Family(_TURN_GEMMA, _OBJECT, guard=_ALTERNATE, is_bare=True, omits="tools",
        head=_raises("messages[0].role == 'system'", "System role not supported")),
    "Gemma 3": Family(_TURN_GEMMA, _CODE, guard=_ALTERNATE, is_bare=True, omits="tools",
        head="{% set s = messages if messages[0].role == 'system' else [''] %}{{ s[0].content }}"
        "{% set messages = messages[(s|length > 1) * 1:] %}"),
    "Gemma 4": Family(
        "<|turn>ROLE\nTEXT<turn|>\n", _WRITTEN["gemma4"], "<|tool_call>call:{{ f.name }}{{ f.arguments }}",
        "<|channel>thought\n{0}<channel|>{1}", _RESULT, _if("reasoning", "<|channel>thought\nIT<channel|>")),
    "Llama 3": Family("<|start_header_id|>ROLE<|end_header_id|>\n\nTEXT<|eot_id|>", _LLAMA, _OBJECTS,
        result=_RESULT, beside="", is_bare=True, guard=_raises("m.tool_calls|length > 1", "one call!")),
    "Llama 4": Family("<|header_start|>ROLE<|header_end|>\nTEXT<|eot|>", _LLAMA_4, _OBJECTS, result=_RESULT),
    "Mistral": Family(_INST, f'[TOOL_CALLS][{_OBJECT[:-1]}, "id": "abcdefgh1"}}]', _OBJECTS + _NINE,
        result=_RESULT, head=_SPACE, guard=_TURNS, beside="", omits="beside"),
    "Magistral": Family(_INST, _HEADS, _ARGS, "[THINK]{0}[/THINK]{1}", _RESULT, head=_SPACE, guard=_TURNS,
        beside=_BLOCKS),
    "Devstral": Family(_INST, _HEADS, _ARGS, result=_RESULT, head=_SPACE, guard=_TURNS),
    "Phi-4": Family("<|im_start|>ROLE<|im_sep|>TEXT<|im_end|>", _HERMES, omits="tools"),
    "Phi-4-mini": Family("<|ROLE|>TEXT<|end|>", f"<|tool_call|>[{_OBJECT}]<|/tool_call|>", omits="tools"),
    "Granite 3": Family(
        _ROLES, f"<|tool_call|>[{_OBJECT}]", _OBJECTS, "<think>{0}</think><response>{1}</response>", _RESULT,
        head="{{ 'Respond between <response></response>' if thinking }}", beside="", is_plain=True),
    "Granite 4": Family(_ROLES, _HERMES, _JSON_CALL, result=_RESULT),
    "LFM2": Family(_CHATML, _WRITTEN["pythonic"]),
    "Nemotron": Family(
        "<SPECIAL_11>ROLE\nTEXT<SPECIAL_12>\n", f"<TOOLCALL>[{_OBJECT}]</TOOLCALL>", _OBJECTS, _THINKS,
        _RESULT, opens="<think>\n", is_plain=True),
    "Command": Family(
        "<|START_OF_TURN_TOKEN|>ROLE TEXT", '<|START_ACTION|>[{"tool_call_id": "0", "tool_name": '
        f'"get_weather", "parameters": {_JSON}}}]<|END_ACTION|>', _OBJECTS, beside="", result=_RESULT,
        said="<|START_THINKING|>{0}<|END_THINKING|><|START_RESPONSE|>{1}<|END_RESPONSE|>",
        thought=_if("tool_plan", "<|START_THINKING|>IT<|END_THINKING|>")),
    "Seed-OSS": Family(
        "<seed:bos>ROLE\nTEXT<seed:eos>", _XML.replace("tool_call", "seed:tool_call"), _XML_CALL,
        "<seed:think>{0}</seed:think>{1}", _RESULT, _if("reasoning_content", "<seed:think>IT</seed:think>")),
    "Hermes 3": Family(_CHATML, _HERMES, _JSON_CALL, result=_RESULT, beside=""),
    "OLMo 3": Family(_CHATML, f"<function_calls>\n{_CODE[1:-1]}\n</function_calls>", _PYTHONIC, _RIGHT,
        _RESULT, is_plain=True),
    "SmolLM3": Family(_CHATML, _HERMES, said=_THINKS),
    "ERNIE 4.5": Family("<|im_start|>ROLE\n<response>\nTEXT\n</response><|im_end|>\n", _HERMES, _JSON_CALL,
        "<think>\n{0}\n</think>\n\n<response>\n{1}\n</response>\n", _RESULT, _THOUGHT, "<think>\n"),
    "Hunyuan": Family("<|startoftext|>TEXT<|extra_0|>", f"<tool_calls>[{_OBJECT}]</tool_calls>", _OBJECTS,
        "<think>\n{0}\n</think>\n<answer>\n{1}\n</answer>", _RESULT, is_plain=True, beside="",
        guard="{% set m = dict(m, content=(m.content or '').split('<answer>')[-1]) %}"),
}  # fmt: skip
