"""docker-compose.yml and the Dockerfiles, as far as they can be judged without a Docker engine.

The files are linted, and every command that they name runs here: the same program, the same
arguments, the same variables, against a real Postgres and a real Valkey.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.request
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import psycopg
import pytest
import redis
import yaml
from redis.backoff import ConstantBackoff
from redis.retry import Retry

from octrain.local.binaries import find_postgres, find_valkey
from octrain.local.servers import LocalServers

REPOSITORY = Path(__file__).parents[2]
COMPOSE = REPOSITORY / "docker-compose.yml"
DOCKERFILES = sorted((REPOSITORY / "docker").glob("*.Dockerfile"))
TOOLS = Path(sys.executable).parent


def compose() -> dict[str, Any]:
    loaded: dict[str, Any] = yaml.safe_load(COMPOSE.read_text())
    return loaded


def run_tool(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(arguments, capture_output=True, text=True, timeout=60, check=False)


def test_compose_is_valid_by_its_schema():
    done = run_tool(
        str(TOOLS / "check-jsonschema"), "--builtin-schema", "vendor.compose-spec", str(COMPOSE)
    )
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("path", DOCKERFILES, ids=lambda path: path.name)
def test_dockerfiles_pass_hadolint(path):
    done = run_tool(str(TOOLS / "hadolint"), str(path))
    assert done.returncode == 0, done.stdout + done.stderr


def test_every_service_is_named_and_built_from_what_is_there():
    loaded = compose()
    services = loaded["services"]
    assert {"postgres", "valkey", "migrate", "api", "controller", "worker-gpu", "worker-cpu"} == (
        set(services)
    )
    stages = {
        path.name: set(re.findall(r"^FROM \S+ AS (\w+)$", path.read_text(), re.MULTILINE))
        for path in DOCKERFILES
    }
    for name, service in services.items():
        build = service.get("build")
        if build is not None:
            dockerfile = Path(build["dockerfile"]).name
            assert build.get("target") is None or build["target"] in stages[dockerfile], name
        for volume in service.get("volumes", []):
            source = volume.partition(":")[0]
            assert source in loaded["volumes"] or source.startswith("$"), name


@pytest.mark.slow
@pytest.mark.parametrize("path", DOCKERFILES, ids=lambda path: path.name)
def test_the_wheel_builds_from_what_is_copied(path, tmp_path):
    """The stage `build`, done here: its files in an empty folder, its command there."""
    _, _, stage = path.read_text().partition(" AS build\n")
    stage = stage.partition("\nFROM ")[0]
    source = tmp_path / "source"
    source.mkdir()
    for line in stage.splitlines():
        words = line.split()
        # What another stage makes, the dashboard, a wheel can be without.
        if words[:1] == ["COPY"] and not words[1].startswith("--from"):
            target = source / words[-1]
            for name in words[1:-1]:
                copied = REPOSITORY / name
                if copied.is_dir():
                    shutil.copytree(copied, target, ignore=shutil.ignore_patterns("__pycache__"))
                else:
                    shutil.copy(copied, target)
    command = re.search(r"^RUN pip (wheel .+)$", stage, re.MULTILINE)
    assert command is not None, stage
    words = command[1].replace("/wheels", str(tmp_path / "wheels")).split()
    done = subprocess.run(
        [sys.executable, "-m", "pip", *words],
        cwd=source,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    (wheel,) = (tmp_path / "wheels").iterdir()
    with zipfile.ZipFile(wheel) as built:
        names = built.namelist()
    assert {"octrain_api/__main__.py", "octrain_worker/__main__.py", "fp8core/__main__.py"} <= (
        set(names)
    )
    runs = re.findall(r"^RUN ((?:pip install|python) (?:.*\\\n)*.*)$", path.read_text(), re.M)
    assert len(runs) == {"api.Dockerfile": 1, "worker.Dockerfile": 2}[path.name]
    for run in runs:
        run_of_a_stage(run, wheel, tmp_path / "stage")


def run_of_a_stage(run: str, wheel: Path, folder: Path) -> None:
    """A RUN line that installs, in the shell that the file names; all of it is here already."""
    folder.mkdir(exist_ok=True)
    (folder / "wheels").mkdir()
    shutil.copy(wheel, folder / "wheels")
    line = run.replace("/wheels", str(folder / "wheels"))
    line = line.replace("/tmp/torch.txt", str(folder / "torch.txt"))
    line = line.replace("/constraints", str(REPOSITORY / "constraints"))
    # It is resolved to the end, with every extra and constraint, and nothing is fetched or changed.
    assert line.count("pip install ") == 1, run
    line = line.replace("pip install ", "pip install --dry-run --no-index ")
    done = subprocess.run(
        ["/bin/bash", "-o", "pipefail", "-c", line],
        env={**os.environ, "PATH": f"{TOOLS}:{os.environ['PATH']}"},
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, run + done.stdout + done.stderr
    assert re.search(r"^Would install .*\boctrain-", done.stdout, re.MULTILINE), done.stdout
    assert "torch-" not in done.stdout.rpartition("Would install")[2], "it keeps the torch it has"
    assert not any(folder.iterdir()), f"it leaves something in the image: {run}"


def test_every_copied_path_exists():
    for path in DOCKERFILES:
        for line in path.read_text().splitlines():
            words = line.split()
            if words[:1] == ["COPY"] and not words[1].startswith("--from"):
                for source in words[1:-1]:
                    assert (REPOSITORY / source).exists(), f"{path.name}: {line}"


def test_every_variable_is_one_that_the_program_reads():
    """A misspelt variable would be ignored in silence."""
    texts = "\n".join(
        path.read_text()
        for folder in ("api/octrain_api", "worker/octrain_worker")
        for path in (REPOSITORY / folder).rglob("settings.py")
    )
    known = {"DATABASE_URL", "REDIS_URL", "OCTRAIN_ROOTS", "OCTRAIN_API_URL", "OCTRAIN_NODE_KEY"}
    known |= {"OCTRAIN_ARTIFACT_URL", "OCTRAIN_NODE_TOKEN"}
    for variable in known:
        field = variable.removeprefix("OCTRAIN_").lower()
        assert variable in texts or re.search(rf"^    {field}: ", texts, re.MULTILINE), variable
    for name, service in compose()["services"].items():
        if service["image"].startswith("octrain"):
            assert set(service["environment"]) <= known, name
    for path in DOCKERFILES:
        assert set(re.findall(r"^ENV (\w+)=", path.read_text(), re.MULTILINE)) <= known


# Every command, run natively


class Containers:
    """Runs a service's command as its container would, with paths and hosts of this machine."""

    def __init__(self, folder: Path, postgres_url: str, redis_url: str) -> None:
        self.folder = folder
        (folder / "data").mkdir()
        self.port = free_port()
        self.values = {"DATABASE_URL": postgres_url, "REDIS_URL": redis_url}
        self.node_token = ""
        self.started: list[subprocess.Popen[bytes]] = []

    def start(self, name: str) -> subprocess.Popen[bytes]:
        argv, environment = self.container(name, compose()["services"][name]["command"])
        with (self.folder / f"{name}.log").open("ab") as log:
            process = subprocess.Popen(
                argv, env=environment, cwd=self.folder, stdout=log, stderr=subprocess.STDOUT
            )
        self.started.append(process)
        return process

    def run_as_documented(self, command: str, node: str = "") -> Any:
        """What a line `docker compose run --rm api COMMAND ...` of docs/operations.md prints."""
        text = (REPOSITORY / "docs" / "operations.md").read_text()
        found = re.search(rf"^docker compose run --rm api ({command} .*)$", text, re.MULTILINE)
        assert found is not None, command
        words = found[1].replace("cpu-node", node or "cpu-node").split()
        argv, environment = self.container("api", words)
        made = subprocess.run(
            argv,
            env=environment,
            cwd=self.folder,
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        assert made.returncode == 0, made.stderr
        return json.loads(made.stdout.splitlines()[-1])

    def container(self, name: str, command: list[str]) -> tuple[list[str], dict[str, str]]:
        """What runs in a container of the service, and with which variables."""
        service = compose()["services"][name]
        dockerfile = (REPOSITORY / service["build"]["dockerfile"]).read_text()
        entry = json.loads(re.findall(r"^ENTRYPOINT (\[.*\])$", dockerfile, re.MULTILINE)[-1])
        image = dict(re.findall(r"^ENV (\w+)=(.*)$", dockerfile, re.MULTILINE))
        argv = [*entry, *(self.here(word) for word in command)]
        assert argv[0] == "python"
        folders = [REPOSITORY, REPOSITORY / "api", REPOSITORY / "worker"]
        # Nothing else of this environment: a container has none of it either.
        environment = {
            "PATH": os.environ["PATH"],
            "HOME": str(self.folder),
            "PYTHONPATH": os.pathsep.join(map(str, folders)),
        }
        for variable, value in {**image, **service["environment"]}.items():
            environment[variable] = self.values.get(variable) or self.here(value)
        return [sys.executable, *argv[1:]], environment

    def here(self, text: str) -> str:
        """A value of the compose file with what is the container's replaced by what is ours."""
        text = text.replace("/var/lib/octrain", str(self.folder / "lib"))
        text = re.sub(r"^/data$", str(self.folder / "data"), text)
        text = text.replace("http://api:8000", f"http://127.0.0.1:{self.port}")
        text = re.sub(r"^8000$", str(self.port), text)
        text = text.replace("0.0.0.0", "127.0.0.1")
        text = text.replace("${OCTRAIN_NODE_TOKEN:-}", self.node_token)
        return re.sub(r"\$\{\w+:-([^}]*)\}", r"\1", text)

    def log(self, name: str) -> str:
        return (self.folder / f"{name}.log").read_text()

    def get(self, path: str, key: str = "") -> Any:
        request = urllib.request.Request(f"http://127.0.0.1:{self.port}{path}")
        if key:
            request.add_header("Authorization", f"Bearer {key}")
        with urllib.request.urlopen(request, timeout=5) as answer:
            return json.loads(answer.read() or b"null")

    def until(self, condition: Any, name: str, seconds: float = 60.0) -> Any:
        deadline = time.monotonic() + seconds
        while True:
            try:
                if found := condition():
                    return found
            except OSError:
                pass
            assert self.started[-1].poll() is None, self.log(name)
            assert time.monotonic() < deadline, self.log(name)
            time.sleep(0.05)

    def end(self) -> None:
        for process in reversed(self.started):
            if process.poll() is None:
                process.send_signal(signal.SIGTERM)
                process.wait(30)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@pytest.fixture
def containers(tmp_path: Path, fresh_postgres_url: str, redis_url: str) -> Iterator[Containers]:
    made = Containers(tmp_path, fresh_postgres_url, redis_url)
    yield made
    made.end()


@pytest.mark.slow
def test_every_command_runs(containers: Containers):
    migrate = containers.start("migrate")
    assert migrate.wait(60) == 0, containers.log("migrate")

    api = containers.start("api")
    containers.until(lambda: containers.get("/readyz"), "api")
    text = (REPOSITORY / "docker" / "api.Dockerfile").read_text()
    check = re.search(r"^HEALTHCHECK .*\n +CMD (\[.*\])$", text, re.MULTILINE)
    assert check is not None
    program, *words = json.loads(check[1].replace(":8000/", f":{containers.port}/"))
    assert program == "python"
    subprocess.run([sys.executable, *words], timeout=30, check=True)
    # The keys and tokens of docs/operations.md, by its own lines.
    key = containers.run_as_documented("create-key")["key"]
    tokens = {
        node: containers.run_as_documented("create-node-token", node)["token"]
        for node in ("cpu-node", "gpu-node")
    }

    controller = containers.start("controller")
    containers.until(lambda: "this controller leads" in containers.log("controller"), "controller")

    # The second is that of a node with GPUs; here it has none, and says so of itself.
    for service, name in (("worker-cpu", "cpu-node"), ("worker-gpu", "gpu-node")):
        containers.node_token = tokens[name]
        worker = containers.start(service)
        (node,) = containers.until(
            lambda own=name: [
                node
                for node in containers.get("/v1/nodes", key)["items"]
                if node["live"] and node["name"] == own
            ],
            service,
            120,
        )
        assert node["roots"] == [str(containers.folder / "data")]
        assert node["private_roots"] is False
        containers.until(lambda log=service: "ready." in containers.log(log), service)
        assert (containers.folder / "lib" / "worker" / "attempts").is_dir()
        worker.send_signal(signal.SIGTERM)
        assert worker.wait(20) == 0, containers.log(service)

    for process in (controller, api):
        process.send_signal(signal.SIGTERM)
        # uvicorn ends by the signal that it was asked with, after an orderly shutdown.
        assert process.wait(20) in (0, -signal.SIGTERM)
    assert "Application shutdown complete" in containers.log("api")
    assert "the controller has ended" in containers.log("controller")


def test_the_command_of_valkey_makes_a_server_that_throws_nothing_away(tmp_path):
    port = free_port()
    words = [
        re.sub(r"\$\{REDIS_PASSWORD:\?[^}]*\}", "secret", word)
        for word in compose()["services"]["valkey"]["command"]
    ]
    assert words[0] == "valkey-server"
    server = subprocess.Popen(
        [str(find_valkey()), *words[1:], "--port", str(port), "--bind", "127.0.0.1"],
        cwd=tmp_path,
        stdout=subprocess.DEVNULL,
    )
    try:
        retry = Retry(ConstantBackoff(0.1), 100)
        with redis.Redis(
            port=port, password="secret", retry=retry, retry_on_error=[redis.ConnectionError]
        ) as client:
            assert client.config_get("maxmemory-policy") == {"maxmemory-policy": "noeviction"}
            assert client.config_get("appendonly") == {"appendonly": "yes"}
        with redis.Redis(port=port) as stranger, pytest.raises(redis.AuthenticationError):
            stranger.ping()
    finally:
        server.terminate()
        server.wait(10)


def test_the_health_check_of_postgres_tells_whether_a_server_answers(
    database_server: LocalServers,
) -> None:
    service = compose()["services"]["postgres"]
    kind, line = service["healthcheck"]["test"]
    assert kind == "CMD-SHELL"
    made = service["environment"]
    programs = find_postgres().folder
    url = urlsplit(database_server.create_database(made["POSTGRES_DB"]))
    # A server whose first user and database are those of the compose file.
    assert url.username == made["POSTGRES_USER"]
    with psycopg.connect(url.geturl()):
        assert check(line, programs, url.port) == 0
    assert check(line, programs, free_port()) == 2, "it found a server where none is"


def check(line: str, programs: Path, port: int | None) -> int:
    """The exit status of a health check's line, as a container's shell runs it."""
    done = subprocess.run(
        ["/bin/sh", "-c", line],
        # In the container the server is found by its socket's usual place.
        env={"PATH": f"{programs}:/usr/bin:/bin", "PGHOST": "127.0.0.1", "PGPORT": str(port)},
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )
    return done.returncode
