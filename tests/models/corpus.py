"""Training text of the test tokenizer, generated from word lists and identical on every machine.

It needs no download and no licence. It covers what servers often get wrong: several scripts, emoji of several
code points, composed and combining accents, code, JSON and numbers.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Sequence


def _words(text: str) -> list[str]:
    return text.split()


_NOUNS = _words("""
answer apple area army artist baby bank bird boat book bottle box boy bread bridge brother building
camera car castle cat chair child church city class clock cloud coat coffee color company computer
corner country day desk dinner doctor dog door dream driver ear earth egg engine evening eye face family
farmer father field fire fish floor flower food forest friend game garden gate girl glass gold grass
ground hand hat head heart hill history home horse hospital hour house idea island journey kitchen lake
language leaf letter light line machine man map market message milk minute mirror model money month moon
morning mother mountain mouse music name night number ocean office paper park party path people person
phone picture place plane plant player question rain request reader result river road rock room rule
school sea season server shadow ship shop signal sister sky snow song sound spring star station stone
store storm story street student summer sun system table teacher team thing time town train tree truth
valley village voice wall water weather week wheel wind window winter woman word work world writer year
""")

_VERBS = _words("""
answers asks becomes begins breaks brings builds calls carries catches changes closes comes cooks counts
covers crosses cuts draws drives enters explains falls feels fills finds follows forgets gives goes
grows hears helps holds keeps knows learns leaves likes listens lives looks loses loves makes meets
moves needs opens paints pays plays pulls pushes reads remembers returns runs says sees sells sends
shows sings sits sleeps speaks stands starts stays stops takes talks teaches tells thinks touches tries
turns understands uses waits walks wants washes watches wins works writes
""")

_ADJECTIVES = _words("""
angry bad beautiful big black blue bright broken brown busy careful cheap clean clear cold cool dark
deep different difficult dry early easy empty every famous fast final first free fresh full good gray
great green happy hard heavy high hot hungry important large last late little long loud lucky narrow new
next old only open orange perfect pink poor pretty quick quiet ready real red rich right round sad safe
short silent simple slow small smart soft special strange strong sweet tall thick thin third tired true
warm wet white whole wide wild wise wrong yellow young
""")

_ADVERBS = _words("""
again almost already always away badly carefully early easily finally gently happily here later mostly
never now often once only quickly quietly really sadly slowly sometimes soon still suddenly there
together twice well
""")

_LINKS = _words("""
about above across after against along around before behind below beside between by from in into near of
on over through to toward under with without
""")

_CHAT = (
    "Hello! How can I help you today?",
    "I'm sorry, I don't know the answer to that question.",
    "Sure, here is a short summary of the text you've sent.",
    "Thank you very much. That's exactly what we were looking for!",
    "You're welcome. Let me know if there's anything else.",
    "Let's think about this step by step. First, we need to count the words.",
    "What is the capital of France? The capital of France is Paris.",
    "What's the weather like in London, Berlin, Tokyo and New York?",
    "You are a helpful assistant. Answer briefly and in the language of the user.",
    "Please write a story about a dragon who couldn't fly.",
    "Yes, of course. No, they didn't. Well... maybe; who knows?",
    "Can you describe this image? It shows two cats and a red ball.",
    "The tool returned an error, so I'll try again with other arguments.",
    "Once upon a time there was a king who had three daughters.",
)

# Words rather than sentences: repeated sentences would be merged into tokens of a line each.
_ACCENTED = _words("""
le garçon a mangé une crêpe près de la fenêtre où l'été était déjà fini der große Bär schläft im Grünen
während über für schön heiß el niño pequeño soñó con una montaña ¿verdad? ¡sí, señor! a canção não é
fácil, mas o coração já está aqui żółty kot śpi příliš žluťoučký kůň İstanbul'da güneşli bir gün
cafe\u0301 nai\u0308ve re\u0301sume\u0301 A\u030angstro\u0308m привет, как дела? сегодня хорошая погода,
и мы идём гулять καλημέρα κόσμε, τι κάνεις σήμερα;
""")

_CHINESE = _words("""
你好 ， 今天 天气 很 好 我们 一起 去 公园 吧 。 请问 这个 问题 的 答案 是 什么 ？ 我 不 知道 中国 首都
北京 上海 一个 大 小 城市 他 喜欢 看 书 也 学习 新 语言 数学 和 谢谢 你 帮助 ！ 明天 见 朋友 这 模型 它
会 写 中文 英文 了 在 有 人 说 可以 因为 所以 、
""")

_JAPANESE = _words("""
こんにちは 、 元気 です か ？ 今日 は とても 良い 天気 ね 。 東京 日本 の 首都 私 毎日 学校 に 行きます
ありがとう ございます また 明日 会いましょう コンピューター と インターネット 便利 この 本 おもしろい
から 読んで ください も を が する した ます ました 人 これ それ 「 」
""")

_KOREAN = _words("""
안녕하세요 오늘 날씨가 정말 좋네요 한국의 수도는 서울입니다 저는 학생입니다 감사합니다 내일 다시 만나요
이 책은 아주 재미있습니다 같이 읽어요 무엇을 도와드릴까요 질문이 있습니다 그리고 우리는 학교에 갑니다
사람이 많이 있어요
""")

_EMOJI = _words("""
😀 😂 😍 🤔 😢 😎 🙏 🎉 🔥 ✨ 🚀 💡 🐱 🐶 🌍 🍎 ☕ ⭐ ✅ ❌ 👍🏽 👋🏻 👏🏿 🤝🏾
❤\ufe0f ☀\ufe0f ✈\ufe0f 1\ufe0f\u20e3 🇩🇪 🇯🇵 🇧🇷 👩\u200d💻
👨\u200d👩\u200d👧\u200d👦 🏳\ufe0f\u200d🌈 🧑🏽\u200d🚀 👩🏻\u200d🔬 🐻\u200d❄\ufe0f
""")

_CODE = (
    "def {a}({b}, {c}=None):\n    if {b} is None:\n        return {c}\n    return {b} + {n}\n",
    'for {a} in range({n}):\n    print(f"{{{a}}}: {{{b}[{a}]}}")\n',
    "class {A}:\n    def __init__(self, {b}):\n        self.{b} = {b}\n",
    "import {a}\nfrom {b} import {c}\n\nwith open('{a}.txt', 'r') as file:\n    {b} = file.read()\n",
    "const {a} = await fetch('https://example.com/{b}?id={n}');\nif (!{a}) {{ throw new Error('{c}'); }}\n",
    "SELECT {a}, count(*) FROM {b} WHERE {c} >= {n} GROUP BY {a};\n",
    "# {A} {b}\n\n- **{a}**: `{b}`\n- [{c}](https://example.com/{c})\n\n```python\n{a} = {n}\n```\n",
    '<div class="{a}"><p>{b}</p></div>\n',
    '$ git commit -m "{a} the {b}" && make {c} # {n}%\n',
)


class _Writer:
    """Draws words with `Random.random()` alone, the only method whose sequence Python promises to keep
    stable."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)

    def pick(self, words: Sequence[str]) -> str:
        return words[self.number(len(words))]

    def number(self, limit: int) -> int:
        return int(self._random.random() * limit)

    def clause(self) -> str:
        subject = f"the {self.pick(_ADJECTIVES)} {self.pick(_NOUNS)}"
        place = f"{self.pick(_LINKS)} the {self.pick(_NOUNS)}"
        return f"{subject} {self.pick(_ADVERBS)} {self.pick(_VERBS)} {place}"

    def english(self) -> str:
        first = self.clause()
        text = first[0].upper() + first[1:]
        if self.number(3) == 0:
            text += f", {self.pick(('and', 'but', 'because', 'while', 'so'))} {self.clause()}"
        return text + self.pick((". ", ".\n", "! ", "? ", ".\n\n"))

    def numbers(self) -> str:
        whole, part = self.number(10_000), self.number(100)
        date = f"20{part:02d}-0{part % 9 + 1}-1{part % 10}"
        return f"{whole} + {part} = {whole + part}; {whole}.{part:02d} $ {part}% {date}\n"

    def code(self) -> str:
        a, b, c = (self.pick(_NOUNS) for _ in range(3))
        return self.pick(_CODE).format(a=a, b=b, c=c, A=a.capitalize(), n=self.number(1000))

    def json(self) -> str:
        value = {
            "name": f"get_{self.pick(_NOUNS)}",
            "arguments": {self.pick(_NOUNS): self.pick(_ADJECTIVES), "count": self.number(50), "unit": None},
            "type": "function",
            "required": [self.pick(_NOUNS), True, False],
        }
        return json.dumps(value, indent=2 if self.number(2) else None) + "\n"

    def emoji(self) -> str:
        first, *others = (self.pick(_EMOJI) for _ in range(4))
        return f"{first} {self.pick(_NOUNS)} {''.join(others)}\n"

    def words(self, words: Sequence[str], joint: str) -> str:
        return joint.join(self.pick(words) for _ in range(4 + self.number(9))) + "\n"


def make_corpus(pieces: int = 8000, seed: int = 0) -> list[str]:
    """Return `pieces` short texts; about half are English, and the other kinds share the rest."""
    writer = _Writer(seed)
    kinds: tuple[Callable[[], str], ...] = (
        *(writer.english,) * 9,
        lambda: writer.pick(_CHAT) + "\n",
        writer.numbers,
        writer.code,
        writer.json,
        writer.emoji,
        lambda: writer.words(_ACCENTED, " "),
        lambda: writer.words(_CHINESE, ""),
        lambda: writer.words(_JAPANESE, ""),
        lambda: writer.words(_KOREAN, " "),
    )
    return [kinds[writer.number(len(kinds))]() for _ in range(pieces)]
