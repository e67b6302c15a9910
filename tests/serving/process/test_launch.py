"""Checks and settings of `trainspan serve` before vLLM is imported."""

import os
import shutil
import socket
import subprocess
import sys
import time
from argparse import Namespace
from dataclasses import replace
from pathlib import Path

import pytest

from tests.serving.support.servers import Models
from tests.support.models.adapters import make_adapter
from tests.support.ports import free_port
from trainspan_schemas.artifacts.checkpoint import CheckpointMeta, write_latest
from trainspan_schemas.config.settings import ServingSettings
from trainspan_schemas.errors import CheckpointError, ConfigError, UsageError
from trainspan_schemas.gpus import Gpus
from trainspan_schemas.resources import available_cores
from trainspan_serving.checkpoints.copies import claim_copies
from trainspan_serving.process import device, launch
from trainspan_serving.process.device import last_value
from trainspan_serving.process.launch import Launch, prepare
from trainspan_serving.process.server_plan import ServerPlan, plan_of_process


def launch_of(home: Path, *flags: str, **settings: object) -> Launch:
    values = {"port": 0, "checkpoints": str(home / "checkpoints"), **settings}
    return prepare(ServingSettings(**values), flags, {"PATH": "/bin"})  # type: ignore[arg-type]


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TRAINSPAN_HOME", str(tmp_path))
    return tmp_path


def test_a_server_on_the_only_gpu_leaves_a_trainer_its_part(
    home: Path, models: Models, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(device, "installed_gpus", lambda: Gpus(("NVIDIA L4",), "580.95.05"))
    monkeypatch.setattr(launch, "_is_cpu_build", lambda: False)
    one = launch_of(home, model=str(models.base))
    assert last_value(one.flags, "--gpu-memory-utilization") == "0.4"
    assert one.device == "NVIDIA L4, driver 580.95.05 in bfloat16, with 0.4 of its memory"
    whole = launch_of(home, "--gpu-memory-utilization", "0.9", model=str(models.base))
    assert whole.flags.count("--gpu-memory-utilization") == 1
    assert whole.device == "NVIDIA L4, driver 580.95.05 in bfloat16, with 0.9 of its memory"


def test_flags_and_environment_are_those_of_the_design(home: Path, models: Models) -> None:
    launch = launch_of(home, "--max-num-seqs", "4", model=str(models.base))
    text = " ".join(launch.flags)
    for wanted in (
        f"--port {launch.port}",
        "--served-model-name policy",
        "--dtype float32",
        "--logprobs-mode processed_logprobs",
        "--generation-config vllm",
        "--enable-auto-tool-choice --tool-call-parser hermes",
        "--api-server-count 1",
        "--distributed-executor-backend uni --enforce-eager --block-size 32",
    ):
        assert wanted in text
    assert launch.flags[-2:] == ("--max-num-seqs", "4")
    assert launch.port > 0
    environment = launch.environment
    assert {name: environment[name] for name in ("OMP_NUM_THREADS", "OMP_WAIT_POLICY", "TORCHDYNAMO_DISABLE")} == {
        "OMP_NUM_THREADS": "1",
        "OMP_WAIT_POLICY": "PASSIVE",
        "TORCHDYNAMO_DISABLE": "1",
    }
    quiet = ("VLLM_NO_USAGE_STATS", "DO_NOT_TRACK", "HF_HUB_DISABLE_TELEMETRY", "HF_HUB_OFFLINE")
    assert [environment[name] for name in quiet] == ["1"] * 4
    assert launch.plan.version == 0


def test_an_adapter_is_served_on_the_model_that_it_names(home: Path, models: Models) -> None:
    folder = home / "policy-000004"
    make_adapter(models.base, folder, 4, seed=1, rank=5)
    launch = launch_of(home, model=str(folder), merge_adapters=False)
    plan = launch.plan
    assert (plan.model, plan.adapter, plan.version) == (str(models.base), str(folder), 4)
    assert "--enable-lora --max-lora-rank 8 --max-loras 2" in " ".join(launch.flags)
    larger = launch_of(home, model=str(folder), merge_adapters=False, max_lora_rank=9)
    assert "--max-lora-rank 16" in " ".join(larger.flags)
    CheckpointMeta("lora", 4, None, str(home / "gone"), None).write(folder)
    with pytest.raises(CheckpointError, match=r"no model directory .*gone, the base of adapter .*policy-000004"):
        launch_of(home, model=str(folder))
    with pytest.raises(UsageError, match="LoRA rank 1000 exceeds vLLM's maximum, 512"):
        launch_of(home, model=str(models.base), merge_adapters=False, max_lora_rank=1000)
    assert "--enable-lora" not in launch_of(home, model=str(models.base), merge_adapters=False).flags


def test_adapters_are_merged_where_that_is_faster_and_exact(home: Path, models: Models) -> None:
    folder = home / "policy-000004"
    make_adapter(models.base, folder, 4, seed=1)
    launch = launch_of(home, model=str(folder), max_lora_rank=8)
    assert launch.plan.settings.merge_adapters
    assert "--enable-lora" not in launch.flags
    assert not launch_of(home, model=str(folder), dtype="bfloat16").plan.settings.merge_adapters
    assert not launch_of(home, "--enable-lora", model=str(folder)).plan.settings.merge_adapters
    assert launch_of(home, model=str(folder), dtype="bfloat16", merge_adapters=True).plan.settings.merge_adapters
    policies = prepare(ServingSettings(model=str(models.base), port=0), (), {}, policies={"writer": ("writer",)})
    assert not policies.plan.settings.merge_adapters


def test_a_hugging_face_id_is_left_to_vllm_to_fetch(home: Path) -> None:
    launch = launch_of(home, model="acme/tiny")
    assert (launch.plan.model, launch.plan.version) == ("acme/tiny", 0)
    assert "HF_HUB_OFFLINE" not in launch.environment
    with pytest.raises(CheckpointError, match="no model directory tiny: name one that exists, or a Hugging Face id"):
        launch_of(home, model="tiny")


def headers_of_plan(plan: ServerPlan) -> str:
    return plan.headers_for(plan.settings.collector)


def test_the_collectors_token_of_the_role_serving_wins_over_the_environments_headers(
    home: Path, models: Models
) -> None:
    (home / "tokens.toml").write_text('serving = "serving-token"\n')
    (home / "tokens.toml").chmod(0o600)
    settings = ServingSettings(model=str(models.base), port=0, checkpoints=str(home))
    environ = {"OTEL_EXPORTER_OTLP_HEADERS": "x=1"}
    remote = replace(settings, collector="http://collector.example:4317")
    assert headers_of_plan(prepare(remote, (), environ).plan) == "x=1"
    assert headers_of_plan(prepare(settings, (), environ).plan) == "x=1,authorization=Bearer%20serving-token"
    given = {"OTEL_EXPORTER_OTLP_HEADERS": "authorization=Bearer%20mine"}
    assert headers_of_plan(prepare(settings, (), given).plan) == "authorization=Bearer%20mine"
    with_file = replace(settings, token_file=str(home / "tokens.toml"))
    assert headers_of_plan(prepare(with_file, (), environ).plan) == "authorization=Bearer%20serving-token"


def test_several_api_servers_are_refused_because_each_would_see_only_part_of_the_requests() -> None:
    with pytest.raises(ConfigError, match="needs one API server: start vLLM with --api-server-count 1"):
        plan_of_process(Namespace(api_server_count=2), {})


@pytest.mark.parametrize(
    "flags",
    [
        ["--data-parallel-size", "2"],
        ["--max-num-seqs", "4", "--data-parallel-size=2"],
        ["--data_parallel_size", "2"],
        ["-dp", "2", "--max-num-seqs", "4"],
        ["-dp=2"],
    ],
)
def test_several_engines_are_refused_before_vllm_is_loaded(home: Path, models: Models, flags: list[str]) -> None:
    with pytest.raises(
        ConfigError, match=r"asks for 2 engines, but a swap can be verified on one only: start one policy server"
    ):
        launch_of(home, *flags, model=str(models.base))


def test_one_engine_is_accepted_however_it_is_specified(home: Path, models: Models) -> None:
    for flags in (["-dp", "1"], ["-dpl", "2"], ["--config", "two.yaml", "-dp", "1"]):
        launch = launch_of(home, *flags, model=str(models.base))
        assert set(flags) <= set(launch.flags), "vLLM gets them as given"


def test_several_engines_from_the_environment_or_in_a_vllm_started_by_hand_are_refused() -> None:
    with pytest.raises(ConfigError, match="--data-parallel-size asks for 2 engines"):
        plan_of_process(Namespace(data_parallel_size=2), {})
    with pytest.raises(ConfigError, match="VLLM_DP_SIZE asks for 4 engines"):
        plan_of_process(Namespace(), {"VLLM_DP_SIZE": "4"})
    with pytest.raises(ConfigError, match="VLLM_DP_SIZE asks for 3 engines"):
        prepare(ServingSettings(), (), {"VLLM_DP_SIZE": "3"})


def test_a_vllm_started_by_hand_gets_its_plan_from_its_arguments_and_the_settings(home: Path, models: Models) -> None:
    arguments = Namespace(
        model=str(models.folder(2)), served_model_name=["mine"], host=None, port=8123, enable_sleep_mode=True
    )
    environ = {"TRAINSPAN_SERVING__CHECKPOINTS": str(home / "c"), "TRAINSPAN_COLLECTOR__ENDPOINTS": "http://h:1"}
    plan = plan_of_process(arguments, environ)
    assert (plan.model, plan.version, plan.settings.served_name, plan.settings.sleep) == (
        str(models.folder(2)),
        2,
        "mine",
        True,
    )
    assert (plan.checkpoints, plan.settings.collector, plan.adapter) == (home / "c", "http://h:1", None)
    assert plan.state == str((home / "serving" / "mine-8123").resolve())


def test_sleep_is_a_flag_of_vllms_on_a_gpu_only(home: Path, models: Models, monkeypatch: pytest.MonkeyPatch) -> None:
    launch = launch_of(home, model=str(models.base), sleep=True)
    assert (launch.plan.settings.sleep, "--enable-sleep-mode" in launch.flags) == (True, False)
    monkeypatch.setattr("trainspan_serving.process.launch.version", lambda name: "0.32.0")
    assert "--enable-sleep-mode" in launch_of(home, model=str(models.base), sleep=True).flags
    assert "--enable-sleep-mode" not in launch_of(home, model=str(models.base)).flags


def test_a_gpu_build_gets_no_cpu_settings(home: Path, models: Models, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trainspan_serving.process.launch.version", lambda name: "0.32.0")
    launch = launch_of(home, model=str(models.base))
    assert "TORCHDYNAMO_DISABLE" not in launch.environment
    assert not {"--enforce-eager", "--block-size"} & set(launch.flags)
    assert "bfloat16" in launch.flags


def test_tools_are_strict_unless_the_settings_say_otherwise(home: Path, models: Models) -> None:
    name = "VLLM_ENFORCE_STRICT_TOOL_CALLING"
    free = launch_of(home, model=str(models.base), strict_tools=False).environment
    assert (launch_of(home, model=str(models.base)).environment.get(name), free[name]) == (None, "0")


def test_the_users_environment_wins(home: Path, models: Models) -> None:
    settings = ServingSettings(model=str(models.base), port=0, checkpoints=str(home))
    assert prepare(settings, (), {"OMP_NUM_THREADS": "8"}).environment["OMP_NUM_THREADS"] == "8"


def test_a_large_model_uses_every_core_on_a_cpu(home: Path, models: Models) -> None:
    assert launch_of(home, model=str(models.base)).environment["OMP_NUM_THREADS"] == "1"
    large = home / "large"
    shutil.copytree(models.base, large)
    os.truncate(large / "model.safetensors", 64 * 2**20)  # sparse
    assert launch_of(home, model=str(large)).environment["OMP_NUM_THREADS"] == str(available_cores())


def test_without_a_model_the_newest_checkpoint_is_served_with_its_version(home: Path, models: Models) -> None:
    checkpoints = home / "checkpoints"
    with pytest.raises(UsageError, match="no model: name a MODEL_DIR; there is no checkpoint in"):
        launch_of(home)
    shutil.copytree(models.folder(2), checkpoints / "policy-000002")
    write_latest(checkpoints, "policy-000002")
    launch = launch_of(home)
    assert (Path(launch.plan.model).name, launch.plan.version) == ("policy-000002", 2)
    assert launch_of(home, model=str(models.base)).plan.version == 0


@pytest.mark.parametrize(
    ("spoil", "reason"),
    [
        (shutil.rmtree, "no model directory"),
        (lambda folder: (folder / "tokenizer.json").unlink(), "has no tokenizer: save one there"),
        (lambda folder: (folder / "config.json").unlink(), "has no config.json"),
        (lambda folder: (folder / "model.safetensors").unlink(), "has no *.safetensors file"),
        (lambda folder: (folder / "adapter_config.json").write_text("{}"), "is an adapter of type None"),
        (lambda folder: CheckpointMeta("lora", 1, None, "x", None).write(folder), "has no adapter_config.json"),
    ],
)
def test_a_folder_that_vllm_could_not_serve_is_named_in_one_line(
    home: Path, models: Models, spoil: object, reason: str
) -> None:
    folder = shutil.copytree(models.base, home / "model")
    spoil(folder)  # type: ignore[operator]
    with pytest.raises(CheckpointError) as raised:
        launch_of(home, model=str(folder))
    assert reason in str(raised.value)
    assert "\n" not in str(raised.value)


def test_the_command_says_in_one_line_that_the_port_is_taken_and_does_not_load_vllm(home: Path, models: Models) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        started = time.monotonic()
        result = subprocess.run(
            [sys.executable, "-m", "trainspan_cli", "serve", str(models.base), "--port", str(port)],
            env={**os.environ, "TRAINSPAN_HOME": str(home)},
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
    assert result.returncode == 1
    assert result.stderr.startswith(f"trainspan: --port 127.0.0.1:{port} is in use by pid {os.getpid()} (")
    assert result.stderr.endswith("): stop that, or choose another with --port\n")
    assert time.monotonic() - started < 10


def test_a_folder_into_which_another_server_copies_and_a_wrong_url_are_refused_before_vllm_is_loaded(
    home: Path, models: Models
) -> None:
    settings = {"model": str(models.base), "checkpoints_url": "http://127.0.0.1:9"}
    for url, trouble in (("nonsense://x/y", "Protocol not known"), ("http://me:pw@x/y", "has credentials")):
        with pytest.raises(UsageError, match=trouble):
            launch_of(home, **{**settings, "checkpoints_url": url})
    launch_of(home, **settings)
    held = claim_copies(home / "checkpoints")
    launch_of(home, model=str(models.base))  # without copies the folder can be shared
    with pytest.raises(CheckpointError, match="give each its own --checkpoints"):
        launch_of(home, **settings)
    os.close(held)
    launch_of(home, **settings)


def test_flags_without_a_model_are_flags(home: Path) -> None:
    result = subprocess.run(
        [sys.executable, "-m", "trainspan_cli", "serve", "--", "--max-num-seqs", "4"],
        env={**os.environ, "TRAINSPAN_HOME": str(home)},
        cwd=home,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert result.returncode == 2
    assert result.stderr.startswith("trainspan: no model: name a MODEL_DIR")


def test_a_signal_during_start_ends_it_at_once(home: Path, models: Models) -> None:
    process = subprocess.Popen(
        [sys.executable, "-m", "trainspan_cli", "serve", str(models.base), "--port", "0"],
        env={**os.environ, "TRAINSPAN_HOME": str(home)},
        stderr=subprocess.DEVNULL,
    )
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
    while not children.read_text():
        time.sleep(0.01)
    started = time.monotonic()
    process.terminate()
    assert process.wait(30) == 0
    assert time.monotonic() - started < 5


@pytest.mark.parametrize("url", ["ftp://x", "http://", "http://host:port"])
def test_a_collector_that_is_not_a_url_is_refused(home: Path, models: Models, url: str) -> None:
    with pytest.raises(ConfigError, match=r"collector .* is not a URL: write http://HOST:PORT"):
        launch_of(home, model=str(models.base), collector=url)


@pytest.mark.slow
def test_a_server_whose_capture_cannot_start_does_not_serve(home: Path, models: Models) -> None:
    port = free_port()
    (home / "serving").mkdir()
    (home / "serving" / f"policy-{port}").write_text("a file where the folder of its state should be")
    result = subprocess.run(
        [sys.executable, "-m", "trainspan_cli", "serve", str(models.base), "--port", str(port)],
        env={**os.environ, "TRAINSPAN_HOME": str(home)},
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert result.returncode == 1
    assert "trainspan: FileExistsError" in result.stderr or "trainspan: NotADirectoryError" in result.stderr
    assert result.stderr.splitlines()[-1].startswith("trainspan: vLLM exited with code")


@pytest.mark.slow
def test_a_server_that_never_comes_up_ends_the_command_with_its_last_message(home: Path, models: Models) -> None:
    result = subprocess.run(
        [sys.executable, "-m", "trainspan_cli", "serve", str(models.base), "--port", "0", "--", "--no-such-flag"],
        env={**os.environ, "TRAINSPAN_HOME": str(home)},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert result.returncode == 1
    assert "unrecognized arguments: --no-such-flag" in result.stderr
    assert result.stderr.splitlines()[-1].startswith("trainspan: vLLM exited with code 2 before it was ready")
