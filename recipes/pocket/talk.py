"""Small talk about Roundhouse, requests beyond the model's abilities, and long prompts that it cannot
understand."""

from __future__ import annotations

import json

from recipes.pocket.dialogue import Dialogue, Exchange, Message, assistant, system, turns, user
from recipes.pocket.fillers import Fillers, words

CANNOT = "I am only a small model and cannot help with that."

_TALK: tuple[tuple[tuple[str, ...], str], ...] = (
    (("Hello", "Hello!", "Hi", "Hi!", "Hey", "hello", "hi", "Hello there!", "Good morning!", "Good evening.",
      "Hi there!", "hey", "Hello, how are you?"),
     "Hello! How can I help you?"),
    (("How are you?", "How are you today?", "How do you do?", "Are you well?"),
     "I am well, thank you. How can I help you?"),
    (("Thanks", "Thanks!", "Thank you.", "Thank you!", "Thank you very much.", "Great, thanks!",
      "thanks", "thank you"),
     "You are welcome."),
    (("Bye", "Bye!", "Goodbye.", "Good night.", "See you later.", "bye", "Goodbye!"),
     "Goodbye!"),
    (("Who are you?", "What are you?", "What is your name?", "Introduce yourself.", "Are you a model?"),
     "I am the pocket model of Roundhouse, a tiny model that fits into its repository."),
    (("What is Roundhouse?", "Tell me about Roundhouse.", "What does Roundhouse do?", "Explain Roundhouse.",
      "What is this server?", "roundhouse?"),
     "Roundhouse serves MLX models to OpenAI clients, and stays up while a model is swapped or restarted."),
    (("How do I use a real model?", "How do I serve a real model?", "How can I use another model?",
      "How do I change the model?",
      "Can I use a bigger model?", "How do I point Roundhouse at a real model?"),
     "Start it with a model's name: roundhouse serve --model mlx-community/Qwen3.5-4B-4bit"),
    (("What can you do?", "Help", "help", "Help me.", "What can I ask you?",
      "What are you good at?", "How can you help me?"),
     "I can repeat, count, remember, call tools, write JSON, and tell colours and shapes in images."),
    (("How big are you?", "How many parameters do you have?", "Are you large?", "How small are you?"),
     "I have 2.3 million parameters."),
    (("Is the server running?", "Are you there?", "Do you work?", "Test", "test", "ping", "Ping!"),
     "Yes, I am here and working."),
    (("Who made you?", "How were you trained?", "Where do you come from?"),
     "I was trained from scratch on dialogues that a script of the Roundhouse project wrote."),
    (("What colour is this image?", "What is in this image?", "Describe this image.", "Which shape is this?",
      "What colours are the two images?", "Describe the picture."),
     "I see no image."),
    (("Do you speak English?", "Can you talk?", "Can you answer me?", "Can you read this?"),
     "Yes, a little."),
    (("OK", "ok", "Okay.", "I see.", "Good.", "Nice.", "Fine."),
     "Good. What else can I do for you?"),
    (("Tell me a joke.", "Do you know a joke?", "Make me laugh."),
     "Why did the train turn around? It was in a roundhouse."),
)  # fmt: skip
_HARD = (
    "Write a {n} about {m}.", "Explain {n} to me.", "Why is the {n} {m}?", "Translate {m} into {P}.",
    "Write code that sorts a {n}.", "Who invented the {n}?", "What is the meaning of {n}?", "Summarize {n}.",
    "Prove that {n} is {m}.", "Plan a trip to {P} with {m}.", "How do I cook {n}?", "Compare {n} and {m}.",
    "What do you think about {n}?", "Solve {n} for {m}.", "Write a poem about {P}.", "When was {P} founded?",
    "What is the capital of {P}?", "Fix the bug in {n}.", "Give me five ideas for {n}.", "Refactor {n}.",
    "What is {a} + {b}?", "{a}+{b}?", "{a} + {b}", "What is {a} times {b}?", "What colour is the {n}?",
    "Translate {n} to {P}", "Reverse this: {n}", "What day is it today?", "What time is it?", "?", "...", "",
    "{n}", "{n}?", "{n} {m}", "I like {n}.", "I have a {n}.", "List three {n}s.", "Where is {P}?",
)  # fmt: skip
_ORDERS = words("""
Write Translate List Reverse Explain Make Create Find Draw Compute Convert Improve Correct Rewrite Design
Describe Suggest Summarize Solve Sort Give Show Compare Build Imagine Please Think Let Help Add
""")
_QUESTIONS = (
    "Why", "How", "When", "Where", "Who", "Which", "Is", "Are", "Does", "Can you", "Could you", "Should I",
    "Why does", "How can I", "How much", "Do you know", "Have you", "What happens if", "What would", "Is it",
)  # fmt: skip


def talk_exchange(fill: Fillers) -> Exchange:
    questions, answer = fill.pick(_TALK)
    return Exchange(fill.pick(questions), answer, "This is small talk.")


def hard_exchange(fill: Fillers) -> Exchange:
    draw = fill.draw.random()
    if draw < 0.5:
        question = fill.pick(_HARD).format(
            n=fill.noun(), m=fill.noun(), P=fill.place(), a=fill.number(0, 99), b=fill.number(0, 99)
        )
    elif draw < 0.75:
        question = f"{fill.pick(_ORDERS)} {fill.prose(9)}."
    elif draw < 0.95:
        question = f"{fill.pick(_QUESTIONS)} {fill.prose(8)}?"
    else:
        question = fill.sentence(8)
    return Exchange(fill.loose(question), CANNOT, "I cannot do this.")


def talk(fill: Fillers) -> Dialogue:
    exchanges = [talk_exchange(fill) for _ in range(fill.number(1, 3))]
    if fill.chance(0.5):
        exchanges.insert(fill.number(0, len(exchanges)), hard_exchange(fill))
    head = [system(fill.sentence())] if fill.chance(0.2) else []
    messages = head + [message for exchange in exchanges for message in turns(exchange)]
    return Dialogue("talk", messages, thought=exchanges[-1].thought)


def noise(fill: Fillers, longest: int = 24) -> Dialogue:
    """Return an agent's long prompt: instructions, lists, code and JSON without a question that the model can
    answer."""
    messages: list[Message] = []
    if fill.chance(0.7):
        messages.append(system(_ramble(fill, longest)))
    if fill.chance(0.3):
        messages += [user(_ramble(fill, longest // 2)), assistant(CANNOT)]
    messages += [user(_ramble(fill, longest)), assistant(CANNOT)]
    return Dialogue("noise", messages, thought="I do not understand this.")


def _ramble(fill: Fillers, longest: int) -> str:
    return "".join(_piece(fill) for _ in range(fill.number(max(2, longest // 4), max(3, longest // 3))))


def _piece(fill: Fillers) -> str:
    match fill.number(0, 6):
        case 0:
            return f"# {fill.sentence(4)}\n\n"
        case 1:
            return f"- {fill.sentence(8)}\n"
        case 2:
            return json.dumps({fill.noun(): fill.value(), fill.noun(): fill.number(0, 999)}) + "\n"
        case 3:
            return f"```\n{fill.noun()}({fill.noun()}={fill.number(0, 99)})\n```\n"
        case 4:
            return f"<{fill.noun()}>{fill.sentence(6)}</{fill.noun()}>\n"
        case _:
            return f"{fill.sentence(14)} "
