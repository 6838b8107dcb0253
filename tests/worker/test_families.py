"""The proof of a family finds what is wrong, whatever it is."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import mlx.nn as nn
import pytest

from tests.oracle import Oracle
from tests.worker.families import prove
from tests.zoo import Prover, prove_all, table
from worker.engine.caches.trial import Stage
from worker.models import rehearsal


# Transformers warns of configs of the families, as they are and have to be.
pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")


@pytest.fixture(scope="module")
def oracle() -> Iterator[Oracle]:
    with Oracle() as oracle:
        yield oracle


def tried_as_it_is(folder: Path, network: nn.Module) -> Stage:
    return Stage(network)


def test_a_family_that_is_wrong_in_batches_is_found(oracle: Oracle, monkeypatch: pytest.MonkeyPatch) -> None:
    assert prove("minimax_m3_vl", 1, oracle).verdict == "equal"
    monkeypatch.setattr(rehearsal, "stage_for", tried_as_it_is)
    outcome = prove("minimax_m3_vl", 1, oracle)
    assert (outcome.verdict, outcome.batched) == ("wrong", True)
    assert "token" in outcome.why


def test_a_family_whose_prompts_cannot_be_cut_must_be_named(
    oracle: Oracle, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert prove("plamo3", 1, oracle).verdict == "equal"
    monkeypatch.setattr("tests.worker.families.CUT_SHOWS", {"llama": "it does not"})
    assert "prompts cannot be cut" in prove("plamo3", 1, oracle).why
    assert "prompts can be cut" in prove("llama", 1, oracle).why


def test_a_family_without_a_config_that_fits_is_wrong_and_says_why(oracle: Oracle) -> None:
    outcome = prove("abacus9", 1, oracle)
    assert outcome.verdict == "wrong"
    assert "abacus9" in outcome.why


def test_a_refusal_must_be_a_sentence(oracle: Oracle, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "'olmo'" in prove("olmo", 1, oracle).why
    monkeypatch.setattr("tests.worker.families.REFUSED", {"llama": "it is not"})
    assert prove("llama", 1, oracle).why == "it loads after all"


def test_a_process_that_dies_is_an_outcome_and_another_takes_over() -> None:
    prover = Prover(1)
    prover._command = ["sh", "-c", "read line; exit 7"]
    assert prover.prove("llama").why == "its process died with status 7"
    prover._command = Prover(1)._command
    assert prover.prove("bitnet").verdict == "refused"
    prover.close()


def test_outcomes_are_in_order_and_make_a_table() -> None:
    outcomes = prove_all(["olmo", "bitnet"], seeds=1, lanes=2)
    assert [outcome.family for outcome in outcomes] == ["bitnet", "olmo"]
    text = table(outcomes)
    assert "2 families, 0 served, 0 of them in batches, 2 refused." in text
    assert text.count("\n| ") == 3
