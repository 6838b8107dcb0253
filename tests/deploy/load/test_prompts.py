"""Prompts of a load: requested lengths, equal only in the shared prefix."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from deploy.load.runner import PromptShape, Scale, prompt_text

scales = st.builds(Scale, fixed=st.floats(0, 30), per_word=st.floats(0.5, 4))


@given(scales, st.integers(50, 3000))
def test_a_scale_is_found_by_two_prompts_and_prompts_come_to_what_was_wanted(
    scale: Scale, wanted: int
) -> None:
    def tokens(words: int) -> float:
        return scale.fixed + words * scale.per_word

    found = Scale.measured(220, round(tokens(220)), 20, round(tokens(20)))
    words = len(prompt_text(PromptShape(wanted), found, "a").split())
    assert abs(tokens(words) - wanted) <= 4 + 0.02 * wanted


def test_a_server_that_does_not_count_is_taken_for_english() -> None:
    assert Scale.measured(220, 0, 20, 0) == Scale()


@given(scales, st.integers(2, 400), st.integers(0, 500))
def test_prompts_share_what_they_are_to_share_and_go_apart_then(
    scale: Scale, prompt: int, shared: int
) -> None:
    one, other = (prompt_text(PromptShape(prompt, shared), scale, "run", number).split() for number in (0, 1))
    assert len(one) == len(other) == scale.words(prompt)
    alike = min(scale.words(prompt) - 1, round(shared / scale.per_word)) if shared else 0
    assert one[:alike] == other[:alike]
    if len(one) - alike > 20:
        assert one[alike:] != other[alike:]
    if len(one) > 20:
        assert prompt_text(PromptShape(prompt, shared), scale, "another run").split() != one
