import os
from pathlib import Path

import pytest

from trainspan_schemas.config.load import load_settings, override
from trainspan_schemas.errors import ConfigError
from trainspan_schemas.home import remember_server
from trainspan_schemas.store.access import StoreAddress, write_address


def written(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "trainspan.toml"
    path.write_text(text)
    return path


def test_flags_beat_environment_beats_file_beats_defaults(tmp_path: Path) -> None:
    config = written(tmp_path, "[rollouts]\nn = 4\nconcurrency = 5\n")
    settings = load_settings(config, {"TRAINSPAN_ROLLOUTS__N": "6"}).rollouts
    assert (settings.n, settings.concurrency, settings.timeout_s) == (6, 5, 120.0)
    assert override(settings, n=7, concurrency=None).n == 7
    assert override(settings, n=7, concurrency=None).concurrency == 5


def test_standard_variables_are_read_and_ours_win_over_them() -> None:
    environ = {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://backend:4317", "OPENAI_BASE_URL": "http://p:1/v1"}
    settings = load_settings(None, environ)
    assert settings.serving.collector == settings.rollouts.collector == "http://127.0.0.1:4317", (
        "a backend is the agent's"
    )
    assert settings.rollouts.policy_url == "http://p:1/v1"
    assert load_settings(None, {**environ, "TRAINSPAN_ROLLOUTS__POLICY_URL": "u"}).rollouts.policy_url == "u"


def test_several_collectors_are_those_of_the_policy_server_and_the_runner(tmp_path: Path) -> None:
    config = written(tmp_path, "[collector]\nendpoints = ['http://a:4317', 'http://b:4317']\n")
    settings = load_settings(config, {})
    assert settings.collector.endpoints == ("http://a:4317", "http://b:4317")
    assert settings.serving.collector == settings.rollouts.collector == "http://a:4317,http://b:4317"
    settings = load_settings(config, {"TRAINSPAN_COLLECTOR__ENDPOINTS": "http://c:1, http://d:1"})
    assert settings.rollouts.collector == "http://c:1,http://d:1"
    own = load_settings(config, {"TRAINSPAN_SERVING__COLLECTOR": "none"})
    assert (own.serving.collector, own.rollouts.collector) == ("none", "http://a:4317,http://b:4317")


def test_senders_follow_the_listeners_unless_they_are_set(tmp_path: Path) -> None:
    moved = written(tmp_path, "[collector]\ngrpc = '0.0.0.0:5317'\n[serving]\nport = 9000\n")
    settings = load_settings(moved, {})
    assert settings.collector.endpoints == ("http://127.0.0.1:5317",)
    assert settings.serving.collector == settings.rollouts.collector == "http://127.0.0.1:5317"
    assert (settings.rollouts.policy_url, settings.train.policy_url) == (
        "http://127.0.0.1:9000/v1",
        "http://127.0.0.1:9000",
    )
    named = {
        "TRAINSPAN_TRAIN__POLICY_URL": "none",
        "OPENAI_BASE_URL": "http://b/v1",
        "TRAINSPAN_COLLECTOR__ENDPOINTS": "http://c:1",
    }
    settings = load_settings(moved, named)
    assert (settings.rollouts.policy_url, settings.train.policy_url) == ("http://b/v1", "none")
    assert settings.rollouts.collector == "http://c:1"


def test_senders_have_no_address_of_a_listener_whose_port_is_not_known(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRAINSPAN_HOME", str(tmp_path / "home"))
    for grpc in ("off", "127.0.0.1:0"):
        settings = load_settings(written(tmp_path, f"[collector]\ngrpc = '{grpc}'\n[serving]\nport = 0\n"), {})
        assert (settings.collector.endpoints, settings.rollouts.collector) == ((), "")
        assert (settings.rollouts.policy_url, settings.train.policy_url) == ("", "")


def test_any_free_ports_are_known_from_the_state_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRAINSPAN_HOME", str(tmp_path / "home"))
    remember_server("model", "http://127.0.0.1:9001")
    store = str(tmp_path / "home" / "spans.duckdb")
    own = write_address(StoreAddress(1, store, "0.0.0.0:9002", None, "127.0.0.1:9003"))
    settings = load_settings(None, {"TRAINSPAN_PORTS__BASE": "0"})
    os.close(own)
    assert settings.rollouts.collector == "http://127.0.0.1:9002"
    assert (settings.rollouts.policy_url, settings.train.policy_url) == (
        "http://127.0.0.1:9001/v1",
        "http://127.0.0.1:9001",
    )


def test_one_setting_moves_all_ports_but_those_that_are_set(tmp_path: Path) -> None:
    config = written(tmp_path, "[ports]\nbase = 5000\n[collector]\nhttp = 'off'\n")
    moved = load_settings(config, {"TRAINSPAN_SERVING__PORT": "9000"})
    assert (moved.collector.grpc, moved.collector.http, moved.collector.flight) == (
        "127.0.0.1:5000",
        "off",
        "127.0.0.1:5002",
    )
    assert (moved.serving.port, moved.view.port) == (9000, 5004)
    assert moved.serving.collector == "http://127.0.0.1:5000"
    with pytest.raises(ConfigError, match=r"ports\.base = 65532: use a port below 65532, or 0"):
        load_settings(None, {"TRAINSPAN_PORTS__BASE": "65532"})


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[collector]\nstores = [1]\n", "collector.stores = [1] is not a list of strings"),
        ("[train]\nlearningrate = 1\n", "unknown key 'learningrate' in [train]; did you mean 'learning_rate'?"),
        ("[trian]\nseed = 1\n", "unknown section [trian]; did you mean 'train'?"),
        ("[train]\nseed = 'x'\n", "train.seed = 'x' is not of type int"),
        ("[advanced]\ntrain.merge = 3\n", "train.merge = 3 is not true or false"),
        ("seed = 1\n", "'seed' is outside a section"),
        ("[train]\nmax_ratio = 1\n", "max_ratio of [train] is advanced: write train.max_ratio = … in [advanced]"),
        ("[advanced]\ntrain.seed = 1\n", "train.seed is not advanced: write seed = … in [train]"),
        ("[advanced]\ntrain.maxratio = 1\n", "unknown key 'maxratio' in [train]; did you mean 'max_ratio'?"),
        ("[advanced]\nmax_ratio = 1\n", "[advanced] has lines such as collector.load_interval_s = 1.0"),
        ("[loop]\nmode = 'waves'\n", "loop.mode = 'waves': use one of rounds, stream"),
        ("[serving]\ndevice = 'gpu'\n", "serving.device = 'gpu': use one of auto, cpu, cuda"),
        ("[model]\ndtype = 'float16'\n", "model.dtype = 'float16': use one of float32, bfloat16"),
        ("[train]\ndtype = 'float32'\n", "unknown key 'dtype' in [train]; it is a setting of [model]"),
        ("[train\n", "trainspan.toml"),
        (f"[train]\nlearning_rate = 1{'0' * 400}\n", "is not of type float"),
        (f"[train]\nseed = {'9' * 5000}\n", "Exceeds the limit (4300 digits)"),
        ("[train]\nlearning_rate = nan\n", "train.learning_rate = nan is not of type float"),
    ],
)
def test_a_wrong_file_is_one_error_that_says_what_to_write(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=r".*") as caught:
        load_settings(written(tmp_path, text), {})
    assert message in str(caught.value)


def test_a_file_may_begin_with_a_byte_order_mark(tmp_path: Path) -> None:
    assert load_settings(written(tmp_path, "\ufeff[train]\nseed = 7\n"), {}).train.seed == 7


def test_an_unknown_variable_names_the_nearest_key() -> None:
    with pytest.raises(ConfigError, match="did you mean 'max_staleness'"):
        load_settings(None, {"TRAINSPAN_DATASET__MAX_STALENES": "3"})


def test_optional_numbers_and_integers_for_floats_are_read(tmp_path: Path) -> None:
    config = written(tmp_path, "[dataset]\nmax_staleness = 2\n[advanced]\ndataset.settle_s = 5\n")
    dataset = load_settings(config, {"TRAINSPAN_DATASET__MAX_TOKENS": "512"}).dataset
    assert (dataset.max_staleness, dataset.max_tokens, dataset.settle_s) == (2, 512, 5.0)
    assert isinstance(dataset.settle_s, float)


def test_a_named_file_that_is_missing_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no configuration file"):
        load_settings(tmp_path / "none.toml", {})


def test_advanced_settings_have_a_table_and_their_sections_variables(tmp_path: Path) -> None:
    config = written(
        tmp_path, "[advanced]\ncollector.load_interval_s = 0.5\ntrain.engine_mismatch = 7\n[train]\nseed = 3\n"
    )
    settings = load_settings(config, {"TRAINSPAN_TRAIN__MAX_RATIO": "9"})
    assert settings.collector.load_interval_s == 0.5
    assert (settings.train.engine_mismatch, settings.train.max_ratio, settings.train.seed) == (7.0, 9.0, 3)


def test_trainer_and_supervised_training_have_the_settings_of_the_model(tmp_path: Path) -> None:
    config = written(
        tmp_path, "[model]\ndtype = 'float32'\nforward = 'packed'\n[train]\nseed = 3\n[sft]\nnum_train_epochs = 2\n"
    )
    settings = load_settings(config, {"TRAINSPAN_MODEL__MICRO_BATCH_TOKENS": "512"})
    for section in (settings.model, settings.train, settings.sft):
        assert (section.dtype, section.forward, section.micro_batch_tokens) == ("float32", "packed", 512)
    assert (settings.train.seed, settings.sft.seed, settings.sft.num_train_epochs) == (3, 0, 2.0)
