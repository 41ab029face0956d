"""examples/: the commands that the scripts start, recorded by stand-ins for Slurm's programs and boost."""

import contextlib
import itertools
import os
import shlex
import signal
import subprocess
import time
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from torch.distributed.run import get_args_parser

from boost.cli.main import build_parser, main, split_overrides
from boost.config import load
from boost.data.store import TokenStore
from boost.errors import TRY_AGAIN
from boost.train.checkpoint import open_checkpoint
from tests.cli.commands import Capture, done, llama_of
from tests.data.inputs import write_texts
from tests.data.web import write_c4
from tests.train.runs import losses

EXAMPLES = Path(__file__).parents[2] / "examples"
LIMIT_S = 600
"""Only against hanging for ever."""
TINY = (
    "--model.vocab_size 300 --model.dim 32 --model.ffn_dim 48 --model.layers 2 --model.heads 4 --model.rank 8 "
    "--parallel.tp 1 --train.seq_len 32 --train.steps 5000 --train.eval_every 0 --train.save_every 0"
)
JOB = "1234567"
MARK = "--- "

SAY = """#!/bin/bash
printf '%s\\n' "--- ${0##*/}" "$@" >> "$CALLS"
"""
SCONTROL = (
    SAY
    + """case "$1 $2" in
'show hostnames') printf '%s\\n' node-7 node-8 ;;
'show job') echo "JobId=$3 PreemptTime=${PREEMPT_TIME:-None}" ;;
esac
"""
)
SRUN = SAY + 'while [[ $1 == --* ]]; do shift; done; exec "$@"\n'
BOOST = SAY + '[[ $2 != --check ]] || exit "${CHECK_CODE:-0}"; exit "${BOOST_CODE:-0}"\n'
SLOW_BOOST = """#!/bin/bash
[[ $2 != --check ]] || exit 0
trap 'echo "--- saved" >> "$CALLS"; exit 75' USR1
echo "--- running" >> "$CALLS"
while true; do sleep 0.1; done
"""


@pytest.fixture
def stage(tmp_path: Path) -> dict[str, str]:
    """The environment of a batch script on the first of two nodes with four GPUs each."""
    for name, text in (("scontrol", SCONTROL), ("srun", SRUN), ("boost", BOOST)):
        put(tmp_path / "bin" / name, text)
    return {
        "PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}",
        "CALLS": str(tmp_path / "calls"),
        "SLURM_JOB_ID": JOB,
        "SLURM_JOB_NODELIST": "node-[7-8]",
        "SLURM_JOB_NUM_NODES": "2",
        "SLURM_GPUS_ON_NODE": "4",
    }


def put(path: Path, text: str) -> None:
    path.parent.mkdir(exist_ok=True)
    path.write_text(text)
    path.chmod(0o755)


def calls(stage: dict[str, str]) -> list[list[str]]:
    """Recorded calls: name and arguments."""
    path = Path(stage["CALLS"])
    text = path.read_text() if path.exists() else ""
    return [call.splitlines() for call in text.split(MARK)[1:]]


def launched(call: list[str]) -> tuple[Namespace, list[str]]:
    """Parses the options of `boost launch` with torchrun's own parser; returns them and the command that it launches."""
    assert call[:2] == ["boost", "launch"]
    dashes = call.index("--")
    return get_args_parser().parse_args([*call[2:dashes], "script"]), call[dashes + 1 :]


def boost_train(words: list[str]) -> Namespace:
    """Parses arguments with `boost`'s own parser."""
    plain, overrides = split_overrides(words)
    args = build_parser().parse_args(plain)
    assert args.command == "train"
    args.overrides = overrides
    return args


def wait_for(condition: Callable[[], bool], process: subprocess.Popen[bytes]) -> None:
    """Waits until `condition` holds; fails if `process` exits first or on a timeout."""
    deadline = time.monotonic() + LIMIT_S
    while not condition():
        assert process.poll() is None, f"ended with {process.returncode}"
        assert time.monotonic() < deadline, "took too long"
        time.sleep(0.02)


def end(process: subprocess.Popen[bytes]) -> None:
    """Terminates `process` and its children. torchrun's processes have separate sessions; its SIGTERM ends them."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        if process.poll() is None:
            os.killpg(process.pid, number)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(LIMIT_S)


def slurm(*words: str) -> list[str]:
    return ["bash", str(EXAMPLES / "slurm.sh"), *words]


def test_slurm_starts_one_torchrun_a_node_with_all_arguments(stage: dict[str, str]) -> None:
    words = ["my run.toml", "--parallel.tp", "4", "--parallel.dp=2"]
    done = subprocess.run(slurm(*words), env=stage, capture_output=True, text=True, timeout=LIMIT_S)
    assert done.returncode == 0, done.stderr
    hostnames, check, srun, started, preempted = calls(stage)
    assert hostnames == ["scontrol", "show", "hostnames", "node-[7-8]"]
    assert check == ["boost", "launch", "--check", "--", "train", "--resume", "auto", *words]
    assert "--ntasks-per-node=1" in srun and preempted == ["scontrol", "show", "job", JOB]
    parsed, given = launched(started)
    assert (parsed.nnodes, parsed.nproc_per_node, parsed.rdzv_backend, parsed.rdzv_id) == ("2", "4", "c10d", JOB)
    host, port = parsed.rdzv_endpoint.split(":")
    assert host == "node-7" and 1024 < int(port) < 32768
    assert parsed.max_restarts > 0
    assert given == ["train", "--resume", "auto", *words]
    args = boost_train(given)
    assert (args.config, args.resume, args.overrides) == ("my run.toml", "auto", words[1:])


def test_slurm_jobs_meet_at_ports_of_their_own_and_a_run_that_failed_is_not_repeated(stage: dict[str, str]) -> None:
    for job, code in ((JOB, 0), (str(int(JOB) + 1), 7)):
        environment = stage | {"SLURM_JOB_ID": job, "BOOST_CODE": str(code)}
        assert subprocess.run(slurm("demo"), env=environment, timeout=LIMIT_S).returncode == code
    made = calls(stage)
    assert ["scontrol", "requeue"] not in [call[:2] for call in made]
    starts = [call for call in made if call[0] == "boost" and "--check" not in call]
    assert len({launched(call)[0].rdzv_endpoint for call in starts}) == 2


def test_slurm_starts_nothing_after_a_mistake(stage: dict[str, str]) -> None:
    assert subprocess.run(slurm("demo"), env=stage | {"CHECK_CODE": "2"}, timeout=LIMIT_S).returncode == 2
    assert [call[0] for call in calls(stage)] == ["scontrol", "boost"]


@pytest.mark.parametrize(("code", "requeues"), [(75, True), (3, True), (2, False), (0, False)])
def test_slurm_requeues_a_preempted_job_that_ended_before_its_grace(
    stage: dict[str, str], code: int, requeues: bool
) -> None:
    environment = stage | {"BOOST_CODE": str(code), "PREEMPT_TIME": "2030-01-01T00:00:00"}
    assert subprocess.run(slurm("demo"), env=environment, timeout=LIMIT_S).returncode == code
    assert (["scontrol", "requeue", JOB] in calls(stage)) == requeues


@pytest.mark.parametrize("number", [signal.SIGUSR1, signal.SIGTERM])
def test_slurm_hands_the_signal_on_waits_and_goes_back_to_the_queue(stage: dict[str, str], number: int) -> None:
    """The time limit sends SIGUSR1; after SIGTERM, Slurm decides whether to requeue the job."""
    put(Path(stage["CALLS"]).parent / "bin" / "boost", SLOW_BOOST)
    process = subprocess.Popen(slurm("demo"), env=stage, start_new_session=True)
    try:
        wait_for(lambda: ["running"] in calls(stage), process)
        process.send_signal(number)
        assert process.wait(LIMIT_S) == 75
    finally:
        end(process)
    requeue = [["scontrol", "requeue", JOB]] if number == signal.SIGUSR1 else []
    after = calls(stage)
    assert after[after.index(["saved"]) :] == [["saved"], ["scontrol", "show", "job", JOB], *requeue]


def test_slurm_array_tasks_are_replicas(stage: dict[str, str]) -> None:
    put(Path(stage["CALLS"]).parent / "bin" / "boost", SAY + 'echo "$BOOST_REPLICA" >> "$CALLS"\n')
    subprocess.run(slurm("demo"), env=stage | {"SLURM_ARRAY_TASK_ID": "3"}, check=True, timeout=LIMIT_S)
    assert next(call for call in calls(stage) if call[0] == "boost")[-1] == "3"


def manifest(name: str, rdma: bool = False) -> list[dict[str, Any]]:
    """The objects of a manifest; with `rdma`, after uncommenting these lines."""
    text = (EXAMPLES / name).read_text(encoding="utf-8")
    return list(yaml.safe_load_all(text.replace("#rdma ", "") if rdma else text))


def kubernetes(name: str = "kubernetes.yaml") -> dict[str, Any]:
    """The objects of a manifest by kind."""
    objects = manifest(name)
    kinds = {found["kind"]: found for found in objects}
    assert len(kinds) == len(objects)
    return kinds


@pytest.mark.parametrize("version", ["1.29", "1.37"])
@pytest.mark.parametrize("name", ["kubernetes.yaml", "kubernetes-data.yaml"])
def test_kubernetes_accepts_the_manifests(name: str, version: str) -> None:
    """Kubernetes' own schemas, strict: an unknown or misspelled field is an error."""
    import kubernetes_validate

    for rdma in (False, True):
        for found in manifest(name, rdma):
            kubernetes_validate.validate(found, version, strict=True)


def test_kubernetes_rdma_lines_ask_for_the_devices_and_for_locked_memory() -> None:
    (job,) = (found for found in manifest("kubernetes.yaml", rdma=True) if found["kind"] == "Job")
    (container,) = job["spec"]["template"]["spec"]["containers"]
    assert container["securityContext"]["capabilities"]["add"] == ["IPC_LOCK"]
    requests, limits = container["resources"]["requests"], container["resources"]["limits"]
    assert requests == limits and requests["rdma/hca_shared_devices_a"] == 1


def test_kubernetes_fails_the_job_after_a_mistake_only() -> None:
    for name in ("kubernetes.yaml", "kubernetes-data.yaml"):
        spec = kubernetes(name)["Job"]["spec"]
        (container,) = spec["template"]["spec"]["containers"]
        rules = [rule for rule in spec["podFailurePolicy"]["rules"] if "onExitCodes" in rule]
        assert {rule["onExitCodes"]["containerName"] for rule in rules} == {container["name"]}
        actions = {code: rule["action"] for rule in rules for code in rule["onExitCodes"]["values"]}
        assert actions == {2: "FailJob"} | ({TRY_AGAIN: "Ignore"} if name == "kubernetes.yaml" else {})


def test_kubernetes_data_is_what_the_run_reads() -> None:
    job = kubernetes("kubernetes-data.yaml")["Job"]["spec"]["template"]["spec"]
    (container,) = job["containers"]
    args = build_parser().parse_args([*container["command"][1:], *container["args"]])
    (run,) = kubernetes()["Job"]["spec"]["template"]["spec"]["containers"]
    assert container["command"][0] == "boost" and f"--data.store {args.out} " in run["args"][0]
    assert args.tokenizer == f"train:{load('boost-7b').model.vocab_size}"
    assert container["volumeMounts"][0] == run["volumeMounts"][0] and container["image"] == run["image"]


@pytest.mark.parametrize("index", [0, 1])
def test_kubernetes_pods_start_the_mesh_that_the_job_has_room_for(stage: dict[str, str], index: int) -> None:
    job, service = kubernetes()["Job"], kubernetes()["Service"]
    template = job["spec"]["template"]["spec"]
    (container,) = template["containers"]
    pod = {entry["name"]: entry["value"] for entry in container["env"]}
    assert all(isinstance(value, str) for value in pod.values()), "Kubernetes takes nothing else"
    environment = stage | pod | {"JOB_COMPLETION_INDEX": str(index)}
    command = [*container["command"], *container["args"]]
    subprocess.run(command, env=environment, check=True, timeout=LIMIT_S)
    (started,) = calls(stage)
    parsed, given = launched(started)

    name, domain = parsed.rdzv_endpoint.split(":")[0].split(".")
    assert name == f"{job['metadata']['name']}-0"
    assert domain == service["metadata"]["name"] == template["subdomain"]
    assert f"is_host={int(index == 0)}" in parsed.rdzv_conf.split(",")
    assert int(parsed.nnodes) == job["spec"]["completions"] == job["spec"]["parallelism"]
    resources = container["resources"]
    assert (
        int(parsed.nproc_per_node) == resources["limits"]["nvidia.com/gpu"] == resources["requests"]["nvidia.com/gpu"]
    )

    args = boost_train(given)
    assert args.resume == "auto"
    config = load(args.config, args.overrides)
    assert config.parallel.world_size == int(parsed.nnodes) * int(parsed.nproc_per_node)
    mounts = [mount["mountPath"] for mount in container["volumeMounts"]]
    for path in (config.run.dir, config.data.store):
        assert any(Path(str(path)).is_relative_to(mount) for mount in mounts), path


def test_kubernetes_objects_belong_together() -> None:
    kinds = kubernetes()
    spec = kinds["Job"]["spec"]
    template = spec["template"]["spec"]
    (container,) = template["containers"]
    assert spec["completionMode"] == "Indexed"
    assert kinds["Service"]["spec"]["clusterIP"] == "None"
    assert kinds["Service"]["spec"]["selector"] == {"batch.kubernetes.io/job-name": kinds["Job"]["metadata"]["name"]}
    assert {mount["name"] for mount in container["volumeMounts"]} == {volume["name"] for volume in template["volumes"]}
    volumes = {volume["name"]: volume for volume in template["volumes"]}
    assert volumes["shm"]["emptyDir"]["medium"] == "Memory"
    claim = volumes["work"]["persistentVolumeClaim"]["claimName"]
    assert claim == kubernetes("kubernetes-data.yaml")["PersistentVolumeClaim"]["metadata"]["name"]
    pods = kinds["Service"]["spec"]["selector"]
    policy = kinds["NetworkPolicy"]["spec"]
    assert policy["podSelector"]["matchLabels"] == pods
    assert policy["ingress"] == [{"from": [{"podSelector": {"matchLabels": pods}}]}]
    patience = next(int(e["value"]) for e in container["env"] if e["name"] == "TORCH_ELASTIC_SHUTDOWN_TIMEOUT")
    assert 30 < patience < template["terminationGracePeriodSeconds"]


def test_usage_lines_are_what_the_commands_take() -> None:
    """The command in slurm.sh's first lines."""
    lines = (EXAMPLES / "slurm.sh").read_text(encoding="utf-8").splitlines()
    usage = next(line for line in lines if line.startswith("#   sbatch "))
    words = shlex.split(usage.lstrip("# "))
    script = words.index("examples/slurm.sh")
    options = dict(zip(words[1:script:2], words[2:script:2], strict=True))
    mesh = dict(zip(words[script + 2 :: 2], words[script + 3 :: 2], strict=True))
    processes = int(options["--nodes"]) * int(options["--gpus-per-node"])
    assert processes == int(mesh["--parallel.tp"]) * int(mesh["--parallel.dp"])


@pytest.mark.slow
def test_a_long_sequence_is_shared_by_two_processes(store: Path, tmp_path: Path) -> None:
    """A shorter sequence; losses match one process."""
    for cp in (1, 2):
        words = ["--parallel.cp", str(cp), "--train.seq_len", "64", "--train.steps", "2", "--model.vocab_size", "300"]
        words += ["--data.store", str(store), "--run.dir", str(tmp_path / str(cp)), "--run.device", "cpu"]
        assert main(["train", str(EXAMPLES / "long.toml"), *words]) == 0
    found = losses(tmp_path / "2")
    assert found == pytest.approx(losses(tmp_path / "1"), rel=1e-5) and len(found) == 2


def walk(script: str, capture: Capture, *words: str, **variables: str) -> list[tuple[str, str]]:
    """Runs the commands that a recipe starts, in this process. Returns the name and the output of each."""
    calls = Path("calls")
    calls.unlink(missing_ok=True)
    put(Path("bin/boost"), SAY)
    environment = (
        os.environ | variables | {"PATH": f"{Path('bin').resolve()}:{os.environ['PATH']}", "CALLS": str(calls)}
    )
    command = ["bash", str(EXAMPLES / "recipes" / script), *words]
    subprocess.run(command, env=environment, check=True, capture_output=True, timeout=LIMIT_S)
    made = [call.splitlines()[1:] for call in calls.read_text().split(MARK)[1:]]
    return [(call[0], done(capture, *call)) for call in made]


def number(output: str, name: str) -> float:
    """A number that `boost eval` prints."""
    return float(next(line.split()[-1] for line in output.splitlines() if line.startswith(name)))


@pytest.mark.slow
def test_the_recipe_of_a_published_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: Capture) -> None:
    monkeypatch.chdir(tmp_path)
    train, heldout = write_c4(tmp_path / "c4"), tmp_path / "validation"
    heldout.mkdir()
    for path in train.glob("c4-validation*"):
        path.rename(heldout / path.name)
    small = {
        "model.dim": 32, "model.ffn_dim": 64, "model.layers": 1, "model.heads": 2, "model.rank": 8, "model.vocab_size": 320,
        "train.steps": 6, "train.seq_len": 16, "train.global_batch": 4, "train.micro_batch": 4,
        "train.compute_dtype": "float32", "optim.warmup_steps": 1, "run.device": "cpu",
    }  # fmt: skip
    variables = {"DATA": f"{train} --heldout-from {heldout}", "TOKENIZER": "train:300", "TOKENS": "384"}
    for again in (False, True):
        told = walk("c4-60m.sh", capfd, *(f"--{key}={value}" for key, value in small.items()), **variables)
        assert [command for command, _ in told] == ["prepare", "train", "eval"]
        assert ("is up to date" in told[0][1]) == ("resumed at step 6 of 6" in told[1][1]) == again
        assert number(told[2][1], "step") == 6
        shorter = done(capfd, "eval", "runs/c4-60m", "--by-document", "--seq-len", 8)
        for length, output in ((16, told[2][1]), (8, shorter)):
            documents = itertools.pairwise(TokenStore.open("data/c4").split("heldout").documents)
            assert number(output, "tokens") == sum(min(int(b - a), length) - 1 for a, b in documents)


@pytest.mark.slow
def test_the_recipe_that_heals(store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: Capture) -> None:
    monkeypatch.chdir(tmp_path)
    weights = llama_of(store, tmp_path / "llama", hidden_size=64, intermediate_size=96, tie_word_embeddings=True)
    text = write_texts(tmp_path / "text", (f"def f{n}(x):\n    return x + {n}\n" * 8 for n in range(40)))
    variables = {"WEIGHTS": str(weights), "DATA": str(text), "BUDGET": "0.5", "SEQ_LEN": "32"}
    for imports in (2, 0):  # none when it runs again
        told = walk("heal-smollm2.sh", capfd, "--train.steps=4", "--run.device=cpu", **variables)
        assert [command for command, _ in told] == ["prepare", *["import"] * imports, "train", *["eval"] * 3]
        dense, factorized, healed = (output for command, output in told if command == "eval")
        assert number(dense, "tokens") == number(factorized, "tokens") == number(healed, "tokens") > 0
        assert number(healed, "step") == 4 and number(healed, "loss") < number(factorized, "loss")
    assert open_checkpoint(Path("runs/llama-healed")).config.distill.teacher == "checkpoints/llama"
