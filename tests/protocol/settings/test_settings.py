"""Settings: precedence, complete error reports, and complete help."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Literal

import msgspec
import pytest
from msgspec import Meta, Struct

from protocol.settings import reader as settings
from protocol.settings.gateway import GatewaySettings
from protocol.settings.reader import EXIT_CONFIGURATION, SettingsError, Size
from protocol.settings.worker import WorkerSettings
from tests.scripted_worker.config import FakeSettings

REMOVED = "it was removed: --kv-bits takes less memory for each token of a request"


class Trains(Struct, frozen=True, kw_only=True):
    """Settings with one field of every type that processes use."""

    name: Annotated[str, Meta(description="what it is called")] = "Flying Scotsman"
    cars: Annotated[int, Meta(ge=1, le=9, description="how many cars")] = 3
    speed_s: Annotated[float, Meta(gt=0, description="100% of the time")] = 1.5
    limit: Annotated[Annotated[int, Meta(ge=1)] | None, Meta(description="a limit, or none")] = None
    folder: Annotated[Path | None, Meta(description="where it is kept")] = None
    coal: Annotated[Size, Meta(description="how much coal")] = 4 * 2**30
    water: Annotated[Size | None, Meta(description="how much water, or none")] = None
    kind: Annotated[Literal["steam", "diesel"], Meta(description="steam or diesel")] = "steam"
    whistles: Annotated[bool, Meta(description="whether it whistles")] = False
    lights: Annotated[bool | None, Meta(description="whether it is lit, or as ever")] = None
    stops: Annotated[tuple[str, ...], Meta(description="where it stops")] = ()


class Driven(Struct, frozen=True, kw_only=True):
    """Settings with a required field, and a rule across fields."""

    driver: Annotated[str, Meta(description="who drives")]
    stoker: Annotated[str, Meta(description="who stokes")] = "Ada"

    def __post_init__(self) -> None:
        if self.driver == self.stoker:
            raise ValueError("driver and stoker must be two people")


def read(
    *argv: str, env: Mapping[str, str] | None = None, kind: type[Struct] = Trains, section: str = "gateway"
) -> Struct:
    return settings.read(kind, section, argv, env or {}, program="trains", about="Runs trains.")


def errors(*argv: str, env: Mapping[str, str] | None = None, kind: type[Struct] = Trains) -> list[str]:
    with pytest.raises(SettingsError) as caught:
        read(*argv, env=env, kind=kind)
    return str(caught.value).splitlines()


@pytest.fixture
def toml(tmp_path: Path) -> Path:
    return tmp_path / "roundhouse.toml"


def test_a_flag_wins_over_a_variable_over_the_file_over_the_default(toml: Path) -> None:
    toml.write_text('[gateway]\nname = "file"\ncars = 4\nspeed_s = 4\nlimit = "overridden"\n')
    variables = {"NAME": "variable", "CARS": "5", "LIMIT": "2", "OTHER": "x"}
    env = {f"ROUNDHOUSE_{name}": value for name, value in variables.items()}
    env |= {"CARS": "8", "ROUNDHOUSE": "x"}
    expected = Trains(name="flag", cars=5, speed_s=4.0, limit=2)
    assert read("--config", str(toml), "--name", "flag", env=env) == expected
    assert read("--name", "flag", env=env | {"ROUNDHOUSE_CONFIG": str(toml)}) == expected
    other = env | {"ROUNDHOUSE_CONFIG": "/missing"}
    assert read("--config", str(toml), "--name", "flag", env=other) == expected
    toml.write_text('[gateway]\ncars = 4\n[worker]\nmodel = "m"\n[serve]\nport = 1\n')
    assert read("--config", str(toml)) == Trains(cars=4)
    assert read("--config", str(toml), section="worker", kind=WorkerSettings) == WorkerSettings(model="m")


# --- types -------------------------------------------------------------------------------------------


def test_values_become_what_the_field_is_wherever_they_are_set(
    toml: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", "/somewhere")
    toml.write_text(
        '[gateway]\ncars = 9\nspeed_s = 2\nlimit = 8\nfolder = "~/keys"\nkind = "diesel"\nname = "7"\n'
    )
    texts = {"cars": "9", "speed_s": "2", "limit": "8", "folder": "~/keys", "kind": "diesel", "name": "7"}
    flags = [f"--{name.replace('_', '-')}={value}" for name, value in texts.items()]
    env = {f"ROUNDHOUSE_{name.upper()}": value for name, value in texts.items()}
    for found in (read(*flags), read(env=env), read("--config", str(toml))):
        expected = Path("/somewhere/keys")
        assert found == Trains(cars=9, speed_s=2.0, limit=8, folder=expected, kind="diesel", name="7")
        assert isinstance(found, Trains)
        assert isinstance(found.speed_s, float)


def test_a_value_of_another_type_in_the_file_is_refused(toml: Path) -> None:
    for line in (
        "cars = true", 'whistles = "true"', "folder = 7", "speed_s = [1]", "water = 1.5",
        'stops = ["York", 1]',
    ):  # fmt: skip
        toml.write_text(f"[gateway]\n{line}\n")
        [error] = errors("--config", str(toml))
        assert error.startswith(line.split(" ")[0] + ": Expected")
        assert error.endswith(f"(from {toml} [gateway])")
    toml.write_text('[gateway]\ncoal = "2 GB"\nwater = 4096\n')
    assert read("--config", str(toml)) == Trains(coal=2 * 10**9, water=4096)
    assert read("--water", "1m", env={"ROUNDHOUSE_COAL": "1.5GiB"}) == Trains(coal=3 * 2**29, water=2**20)


@pytest.mark.parametrize("name", ["whistles", "lights"])
def test_a_switch_is_set_by_its_name_and_unset_by_no(name: str) -> None:
    env = {f"ROUNDHOUSE_{name.upper()}": "true"}
    assert read(f"--{name}") == read(env=env) == Trains(**{name: True})  # type: ignore[arg-type]
    assert read(f"--no-{name}", env=env) == Trains(**{name: False})  # type: ignore[arg-type]


def test_a_list_is_given_in_one_piece_or_in_several_and_as_text_or_an_array_in_the_file(toml: Path) -> None:
    for argv in ("--stops=York,Leeds", "--stop York --stop Leeds", "--stop York, --stops=,Leeds,"):
        assert read(*argv.split()) == Trains(stops=("York", "Leeds"))
    assert read("--stop", " York ,", "--stop", "Leeds") == Trains(stops=("York", "Leeds"))
    toml.write_text('[gateway]\nstops = ["York", "Leeds, Central"]\n')
    assert read("--config", str(toml)) == Trains(stops=("York", "Leeds, Central"))
    toml.write_text('[gateway]\nstops = "York, Ely"\n')
    assert read("--config", str(toml)) == Trains(stops=("York", "Ely"))
    env = {"ROUNDHOUSE_STOPS": "Hull, Selby"}
    assert read("--config", str(toml), env=env) == Trains(stops=("Hull", "Selby"))
    assert read("--config", str(toml), "--stop", "Ely", env=env) == Trains(stops=("Ely",))
    assert read("--config", str(toml), env={"ROUNDHOUSE_STOPS": ""}) == Trains()


# --- errors ------------------------------------------------------------------------------------------


def test_everything_wrong_is_said_at_once_with_its_source(toml: Path) -> None:
    toml.write_text('[gateway]\ncars = 99\ncolour = "red"\n[depot]\nx = 1\n')
    found = errors(
        "--config", str(toml), "--kind", "electric", env={"ROUNDHOUSE_SPEED_S": "-1", "ROUNDHOUSE_LIMIT": "x"}
    )
    assert len(found) == 6
    text = "\n".join(found)
    assert f"{toml}: unknown section [depot]" in found
    assert f"{toml}: unknown key colour in [gateway]" in found
    assert f"cars: Expected a whole number <= 9 (from {toml} [gateway])" in found
    assert "(from ROUNDHOUSE_SPEED_S)" in text
    assert "(from --kind)" in text


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[gateway]\ncar = 1", "unknown key car in [gateway]; did you mean cars?"),
        ("[gateway]\ncaboose = 1", "unknown key caboose in [gateway]"),
        ("[gateway]\nmax_kv_size = 9", f"unknown key max_kv_size in [gateway]; {REMOVED}"),
        ("[model.a]", "unknown section [model]; did you mean models?"),
    ],
)
def test_an_unknown_name_is_told_with_the_one_that_may_be_meant(text: str, said: str, toml: Path) -> None:
    toml.write_text(text)
    assert errors("--config", str(toml)) == [f"{toml}: {said}"]


def test_a_variable_of_a_removed_setting_is_refused_with_what_to_use_instead() -> None:
    assert errors(env={"ROUNDHOUSE_MAX_KV_SIZE": "9"}) == [f"ROUNDHOUSE_MAX_KV_SIZE: {REMOVED}"]


def test_a_field_without_a_default_is_required_and_rules_across_fields_hold(toml: Path) -> None:
    assert errors(kind=Driven) == ["driver: is required"]
    assert read("--driver", "Bo", kind=Driven) == Driven(driver="Bo")
    assert errors("--driver", "Ada", kind=Driven) == ["driver and stoker must be two people"]
    toml.write_text("[gateway]\ndriver = 7\n")
    [error] = errors("--config", str(toml), kind=Driven)
    assert error.startswith("driver: Expected text")


# --- the file ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (None, ": no such file or folder"),
        (b"[gateway\n", " is not valid TOML: "),
        ("[gateway]\n".encode("utf-16"), ": it is UTF-16: save it as UTF-8"),
        (b"[gateway]\n# Z\xfcrich\n", ": it is not UTF-8 (line 2): save it as UTF-8"),
        (b"\xef\xbb\xbfgateway = 7\n", ": gateway must be a table"),
        (b"gateway = 7\n", ": gateway must be a table"),
    ],
)
def test_a_file_that_cannot_be_read_is_an_error(content: bytes | None, why: str, toml: Path) -> None:
    if content is not None:
        toml.write_bytes(content)
    [error] = errors("--config", str(toml))
    assert error.startswith(f"{toml}{why}")


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("cars", 9, 9),
        ("cars", "9", 9),
        ("name", 7, "7"),
        ("coal", "1K", 1024),
        ("stops", ["York, Ely"], ("York, Ely",)),
        ("cars", 10, "[a] cars: Expected a whole number <= 9 (from FILE)"),
        ("cars", [9], "[a] cars: Expected a whole number, got a list (from FILE)"),
        ("folder", "", "[a] folder: Expected a path (from FILE)"),
        ("whistles", "true", "[a] whistles: Expected true or false, got text (from FILE)"),
    ],
)
def test_in_the_table_of_a_model_numbers_and_names_may_be_text(
    name: str, value: object, expected: object
) -> None:
    wrong: list[str] = []
    given = settings.of_table(Trains, name, value, "FILE", "[a] ")
    found = settings.convert(Trains, {name: given}, wrong)
    assert (wrong[0] if wrong else getattr(found, name)) == expected


# --- the command line --------------------------------------------------------------------------------


def test_an_unknown_flag_or_a_value_out_of_bounds_is_refused_with_its_source() -> None:
    for argv in (["--colour", "red"], ["caboose"], ["--cars"]):
        [error] = errors(*argv)
        assert argv[0] in error
    for word in [
        "--cars=0",
        "--cars=many",
        "--cars=",
        "--speed-s=0",
        "--speed-s=nan",
        "--folder=",
        "--kind=electric",
    ]:
        [error] = errors(word)
        flag, _, _ = word.partition("=")
        assert error.startswith(flag[2:].replace("-", "_") + ":")
        assert error.endswith(f"(from {flag})")


SIZES = {"coal", "prefix_cache_disk", "media_memory", "batch_storage", "journal_max"}


@pytest.mark.parametrize("kind", [Trains, GatewaySettings, WorkerSettings, FakeSettings])
def test_help_lists_every_field_with_what_it_is_for(
    kind: type[Struct], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    with pytest.raises(SystemExit) as caught:
        read("--help", kind=kind)
    assert caught.value.code == 0
    told = capsys.readouterr().out
    entries = {entry.split()[0].rstrip(","): " ".join(entry.split()) for entry in told.split("\n  -")[1:]}
    assert "-config" in entries
    for field in msgspec.structs.fields(kind):
        entry = entries["-" + field.encode_name.replace("_", "-")]
        if field.default not in (None, "", (), False, msgspec.NODEFAULT):
            is_size = field.name in [
                "coal",
                "prefix_cache_disk",
                "media_memory",
                "batch_storage",
                "journal_max",
            ]
            default = f"(default: {settings.spell_size(field.default) if is_size else field.default})"
            assert entry.endswith(default)
            entry = entry.removesuffix(default)
        assert len(entry.split()) > 2, f"{field.name} has no description"


@pytest.mark.parametrize("kind", [GatewaySettings, WorkerSettings])
def test_the_defaults_of_a_process_are_valid_settings(kind: type[Struct]) -> None:
    defaults = kind()
    env = {
        f"ROUNDHOUSE_{name.upper()}": str(value)
        for name, value in msgspec.structs.asdict(defaults).items()
        if value not in (None, ())
    }
    assert read(env=env, kind=kind) == defaults


def test_settings_that_are_sent_are_used_as_they_are_or_refused() -> None:
    sent = {"program": "trains", "about": "", "argv": ["--cars=9"], "environ": {"ROUNDHOUSE_CARS": "8"}}
    document = b'{"cars": 4, "folder": "/keys", "added": "by a later version"}\n'
    found = settings.read_or_exit(Trains, "gateway", document=document, **sent)  # type: ignore[arg-type]
    assert found == Trains(cars=4, folder=Path("/keys"))
    with pytest.raises(SystemExit) as caught:
        settings.read_or_exit(Trains, "gateway", document=b'{"cars": 99}', **sent)  # type: ignore[arg-type]
    assert caught.value.code == EXIT_CONFIGURATION


def test_a_gateway_with_wrong_settings_exits_with_78_before_it_listens() -> None:
    env = os.environ | {"ROUNDHOUSE_MAX_WAITING": "-1"}
    command = [sys.executable, "-m", "broker", "--port", "99999999"]
    ended = subprocess.run(command, env=env, capture_output=True, text=True, timeout=60, check=False)
    assert ended.returncode == EXIT_CONFIGURATION
    lines = ended.stderr.splitlines()
    assert len(lines) == 2
    assert lines[0].startswith("roundhouse gateway: port:")
    assert lines[1].startswith("roundhouse gateway: max_waiting:")
