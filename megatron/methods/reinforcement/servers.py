"""Samples answers by inference servers, which get each generation's weights as HuggingFace folders."""

import json
import os
import shutil
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path

from megatron.callbacks import TrainingRun
from megatron.checkpointing import replace_file
from megatron.data.files import sha256
from megatron.distributed import on_rank_zero
from megatron.generation.weight_updates import WeightUpdate
from megatron.methods.reinforcement.answers import Answer
from megatron.methods.reinforcement.conversations import Conversations
from megatron.methods.reinforcement.generation import Shares
from megatron.methods.reinforcement.keys import ReinforcementKeys, rollout_keys
from megatron.methods.reinforcement.sampler import AnswerRequest, Turn, turn_of
from megatron.methods.reinforcement.server_apis import SERVERS, ServerAPI
from megatron.methods.reinforcement.server_calls import Connection
from megatron.methods.reinforcement.weight_server import WeightServer
from megatron.process import look_for_stop

_CONCURRENT_REQUESTS = 128  # per server, which may queue some of them
_LOOKS_S = 1.0  # seconds of waiting after which rank 0 looks for a stop signal
_TOKEN_VARIABLE = "NEOX_SERVE_TOKEN"


class ServerSampler:
    """Samples the answers of a generation by the servers in `rollout.servers`.

    All ranks must call every method together. Only rank 0 talks to the servers. One thread sends them new
    weights, then requests the answers of a generation, then goes on with the next one. The rows of data rank
    r are answered by server r modulo the number of servers. With `rollout.staleness` the thread works ahead
    while the ranks train.
    """

    def __init__(
        self,
        run: TrainingRun,
        run_id: str,
        addresses: Sequence[str],
        stop_token_ids: tuple[int, ...],
        shares: Shares,
        conversations: Conversations | None,
    ) -> None:
        """Connects to the servers and checks that they respond.

        run_id: name of this run's folder in `rollout.sync`. conversations: None without an environment.
        Raises ServerError for a server that does not respond.
        """
        args = run.args
        options = rollout_keys(args)
        assert args.train_iters is not None
        self.run, self.conversations, self.staleness = run, conversations, options["staleness"]
        self.last = (args.train_iters - 1) // (shares.steps * options["num_iterations"])
        self.last_requested = -1
        folder = options["sync"] or f"{args.save}/rollout_weights"
        self.folders = WeightFolders(run, Path(folder).absolute() / run_id, max(2, self.staleness + 1))
        if self.staleness:
            run.logger.info(
                f"rollout.staleness {self.staleness}: if this run is interrupted, it does not resume bit for bit, "
                "because answers requested ahead are requested again, from newer weights"
            )
        self.server_of_row = [0] * shares.total
        for rank in range(shares.data_size):
            for rows in shares.micro_batches(rank):
                for row in rows:
                    self.server_of_row[row] = rank % len(addresses)
        self._pending: dict[int, Future[tuple[list[Answer], int]]] = {}  # on rank 0, by generation
        self._serving: int | None = None  # the weight version that all servers have loaded
        self.servers: list[ServerAPI] = []
        self._weight_server: WeightServer | None = None  # on rank 0
        on_rank_zero(run.groups, lambda: self._begin(addresses, stop_token_ids))

    def _begin(self, addresses: Sequence[str], stop_token_ids: tuple[int, ...]) -> None:
        options = rollout_keys(self.run.args)
        self._in_turn = ThreadPoolExecutor(1, "rollouts")
        self._requests = ThreadPoolExecutor(_CONCURRENT_REQUESTS * len(addresses), "rollout_requests")
        token = os.environ.get(_TOKEN_VARIABLE) or None
        for address in addresses:
            connection = Connection(address, token, options["server_timeout_s"], self.run.logger.warning)
            server = SERVERS[options["server_api"]]
            self.servers.append(server(connection, options["temperature"], stop_token_ids))
        if ReinforcementKeys.read_from(self.run.args).serve_model_weights:
            self._weight_server = WeightServer(self.run.args)
        self._for_all_servers(lambda server: server.check())
        self._for_all_servers(self._check_precision)

    def _check_precision(self, server: ServerAPI) -> None:
        """Compares the server's dtype with the trainer's, because log-probabilities of other dtypes differ.

        Raises ServerError if they differ; with `rollout.logprob_bound: 0` it only warns.
        """
        precision, reported, connection = self.run.args.params_dtype, server.precision(), server.connection
        if reported is None:
            self.run.logger.info(
                f"rollout.servers: {connection.address} does not tell its dtype; this run has {precision}"
            )
        elif reported != precision:
            text = f"the server computes in {reported}, and this run in {precision} (precision)"
            if rollout_keys(self.run.args)["logprob_bound"]:
                raise connection.error(f"{text}; start the server with this dtype, or set rollout.logprob_bound: 0")
            self.run.logger.warning(f"rollout.servers: {connection.address}: {text}")

    def __call__(self, number: int, requests_of: Callable[[int], list[AnswerRequest]]) -> tuple[list[Answer], int]:
        """Returns the answers of generation `number` in the order of its rows, and the version of the weights
        that wrote them.

        requests_of: function from a generation's number to its requests. Raises ServerError if a server
            fails, and StopRequested if a stop signal comes first.
        """
        generations = range(max(number, self.last_requested + 1), min(number + self.staleness, self.last) + 1)
        if generations:
            weights = self.folders.write(number)
            self.last_requested = generations[-1]

            def submit() -> None:
                if self._weight_server is not None:
                    self._weight_server.offer(weights, self.folders.num_versions)
                for generation in generations:
                    requests = requests_of(generation)
                    self._pending[generation] = self._in_turn.submit(self._answers, requests, weights)

            on_rank_zero(self.run.groups, submit)
        return on_rank_zero(self.run.groups, lambda: self._waited_for(self._pending.pop(number)))

    def _waited_for(self, answers: Future[tuple[list[Answer], int]]) -> tuple[list[Answer], int]:
        while not wait([answers], _LOOKS_S).done:
            look_for_stop()
        return answers.result()

    def _answers(self, requests: Sequence[AnswerRequest], weights: WeightUpdate) -> tuple[list[Answer], int]:
        """Loads the weights into all servers and collects a generation's answers. Runs in the thread of rank
        0."""
        if self._serving != weights.version:
            self._for_all_servers(lambda server: server.update(weights, self._url(weights, server)))
            self._serving = weights.version
        answers = self._requests.map(
            lambda row: self._answer(row, requests[row], weights.version), range(len(requests))
        )
        return list(answers), weights.version

    def _url(self, weights: WeightUpdate, server: ServerAPI) -> str | None:
        """Returns the URL at which the server fetches the weights; None: it reads them from their folder."""
        weight_server = self._weight_server
        return None if weight_server is None else weight_server.url(weights.version, server.connection.address)

    def _answer(self, row: int, request: AnswerRequest, version: int) -> Answer:
        if self.conversations is not None:
            return self.conversations.hold(request, lambda turn: self._write(row, turn, version))
        return self._write(row, turn_of(self.run, request), version)

    def _write(self, row: int, turn: Turn, version: int) -> Answer:
        server = self.server_of_row[row]
        written = self.servers[server].write(turn.tokens, turn.room, turn.seed)
        if written.weight_version != (version if self.servers[server].names_weights else None):
            reported_version = "of unknown version" if written.weight_version is None else written.weight_version
            raise self.servers[server].connection.error(
                f"the server answers with weights {reported_version}, but was given version {version}: another run "
                "updates its weights too, or it was restarted; use a server in one run only"
            )
        return Answer(turn.tokens, written.tokens, written.logprobs, written.finished)

    def _for_all_servers(self, work: Callable[[ServerAPI], None]) -> None:
        """Calls `work` for all servers in parallel, and waits for all of them."""
        list(self._requests.map(work, self.servers))

    def close(self) -> None:
        """Cancels all requests to servers, without waiting for them."""
        if self.run.groups.world_rank == 0:
            self._in_turn.shutdown(wait=False, cancel_futures=True)
            self._requests.shutdown(wait=False, cancel_futures=True)
        for server in self.servers:
            server.connection.close()
        if self._weight_server is not None:
            self._weight_server.close()


class WeightFolders:
    """Writes the model's weights to `FOLDER/VERSION`, keeps the last `num_versions` versions, and updates
    `FOLDER/latest`.

    `latest` is JSON with the newest version, its folder and the SHA-256 of its files. All ranks must call
    every method together.
    """

    def __init__(self, run: TrainingRun, folder: Path, num_versions: int) -> None:
        self.run, self.folder, self.num_versions = run, folder, num_versions

    def write(self, version: int) -> WeightUpdate:
        """Writes the model's current weights as `version`, in HuggingFace's format. Raises CheckpointError if
        this fails."""
        path = self.folder / str(version)
        with self.run.watchdog.phase("writing weights for servers"):
            self.run.save_hf_model(path)
            return on_rank_zero(self.run.groups, lambda: self._publish(path, version))

    def _publish(self, path: Path, version: int) -> WeightUpdate:
        files = {file.name: sha256(file) for file in sorted(path.iterdir()) if file.is_file()}
        update = WeightUpdate(str(path), version, files)
        content = {"version": version, "folder": path.name, "sha256": files}
        replace_file(self.folder / "latest", (json.dumps(content, indent=1) + "\n").encode())
        for old_folder in self.folder.iterdir():
            if old_folder.name.isdecimal() and not version - self.num_versions < int(old_folder.name) <= version:
                shutil.rmtree(old_folder, ignore_errors=True)
        return update
