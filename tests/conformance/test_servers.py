"""Selection of a lane's drivers, and their variables."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.conformance.__main__ import SMOKES
from tests.conformance.drivers import Driver, drivers_in, environment_of
from tests.conformance.servers import EMBEDDER, HOUSES, KEY


def driver(folder: Path, source: str) -> Driver:
    path = folder / "openai_sdk.py"
    path.write_text(source)
    environment = environment_of(path.name)
    assert environment is not None
    return Driver(path, environment)


def test_a_lane_is_about_drivers_that_know_what_it_tells(tmp_path: Path) -> None:
    plain = driver(tmp_path, "print('1/1')")
    assert [lane for lane, house in HOUSES.items() if house.concerns(plain)] == ["capable", "keys"]
    assert HOUSES["limits"].concerns(driver(tmp_path, "os.environ['CTX']"))
    assert HOUSES["embeddings"].concerns(driver(tmp_path, "need='EMBED'"))


def test_single_model_driver_gets_the_embedding_model(tmp_path: Path) -> None:
    house = HOUSES["embeddings"]
    assert "MODEL" not in house.variables(driver(tmp_path, "EMBED, EMBED_MODEL"))
    assert house.variables(driver(tmp_path, "EMBED"))["MODEL"] == EMBEDDER


def test_keys_are_asked_for_in_one_lane_and_drivers_told_of_it() -> None:
    assert [lane for lane, house in HOUSES.items() if "--api-keys" in house.flags] == ["keys"]
    assert HOUSES["keys"].told["API_KEY"] == KEY


@pytest.mark.parametrize("lane", HOUSES)
def test_every_lane_is_about_one_of_our_smokes(lane: str) -> None:
    drivers, _ = drivers_in(SMOKES)
    assert any(HOUSES[lane].concerns(each) for each in drivers)
