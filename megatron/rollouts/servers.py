"""Answers by servers, which are given the weights of each generation."""

import os
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path

from megatron.callbacks import TrainingRun
from megatron.distributed import on_rank_zero
from megatron.generation.weight_updates import WeightUpdate
from megatron.process import look_for_stop
from megatron.rollouts.answers import Answer
from megatron.rollouts.conversations import Conversations
from megatron.rollouts.generation import Shares
from megatron.rollouts.sampler import Asked, Turn, turn_of
from megatron.rollouts.server_apis import ServerAPI, server_class
from megatron.rollouts.server_calls import Connection
from megatron.rollouts.weight_folders import WeightFolders
from megatron.rollouts.weight_server import WeightServer

_AT_ONCE = 128  # requests to a server; it lets some of them wait if it wants
_LOOKS_S = 1.0  # seconds of waiting after which rank 0 looks for a stop signal
_TOKEN_VARIABLE = "NEOX_SERVE_TOKEN"


class ServerSampler:
    """Answers to the prompts of a generation, by the servers of `rollout`.

    All ranks call every method together. Rank 0 alone talks to the servers, for all of them: a thread gives
    them the weights, then asks for the answers of a generation, and so on; data rank r's rows are asked of
    server r, counted round. With `rollout.staleness` it does so ahead, while the ranks train.
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
        """run_id: the name of this run's folder in `rollout.sync`. conversations: None where there is no
        environment. Raises ServerError for a server that is not there."""
        args = run.args
        assert args.rollout is not None and args.train_iters is not None
        self.run, self.conversations, self.staleness = run, conversations, args.rollout["staleness"]
        self.last = (args.train_iters - 1) // (shares.steps * args.rollout["num_iterations"])
        self.asked_up_to = -1
        folder = args.rollout["sync"] or f"{args.save}/rollout_weights"
        self.folders = WeightFolders(run, Path(folder).absolute() / run_id, max(2, self.staleness + 1))
        if self.staleness:
            run.logger.info(
                f"rollout.staleness {self.staleness}: interrupted, the run does not go on bit for bit: answers under "
                "way are asked for again, by newer weights"
            )
        self.server_of_row = [0] * shares.total
        for rank in range(shares.data_size):
            for rows in shares.micro_batches(rank):
                for row in rows:
                    self.server_of_row[row] = rank % len(addresses)
        self._pending: dict[int, Future[tuple[list[Answer], int]]] = {}  # on rank 0, by generation
        self._serving: int | None = None  # the version that all servers have
        self.servers: list[ServerAPI] = []
        self._weight_server: WeightServer | None = None  # on rank 0
        on_rank_zero(run.groups, lambda: self._begin(addresses, stop_token_ids))

    def _begin(self, addresses: Sequence[str], stop_token_ids: tuple[int, ...]) -> None:
        options = self.run.args.rollout
        assert options is not None
        self._in_turn = ThreadPoolExecutor(1, "rollouts")
        self._requests = ThreadPoolExecutor(_AT_ONCE * len(addresses), "rollout_requests")
        token = os.environ.get(_TOKEN_VARIABLE) or None
        for address in addresses:
            connection = Connection(address, token, options["server_timeout_s"], self.run.logger.warning)
            server = server_class(options["server_api"])
            self.servers.append(server(connection, options["temperature"], stop_token_ids))
        if self.run.args.serve_model_weights:
            self._weight_server = WeightServer(self.run.args)
        self._of_each(lambda server: server.check())

    def __call__(self, number: int, asked_of: Callable[[int], list[Asked]]) -> tuple[list[Answer], int]:
        """The answers of generation `number`, in the order of its rows, and the version of the weights that
        wrote them. asked_of: what a generation answers. Raises ServerError, and StopRequested where a stop
        signal comes first."""
        wanted = range(max(number, self.asked_up_to + 1), min(number + self.staleness, self.last) + 1)
        if wanted:
            weights = self.folders.write(number)
            self.asked_up_to = wanted[-1]

            def submit() -> None:
                if self._weight_server is not None:
                    self._weight_server.offer(weights, self.folders.kept)
                for generation in wanted:
                    asked = asked_of(generation)
                    self._pending[generation] = self._in_turn.submit(self._answers, asked, weights)

            on_rank_zero(self.run.groups, submit)
        return on_rank_zero(self.run.groups, lambda: self._waited_for(self._pending.pop(number)))

    def _waited_for(self, answers: Future[tuple[list[Answer], int]]) -> tuple[list[Answer], int]:
        while not wait([answers], _LOOKS_S).done:
            look_for_stop()
        return answers.result()

    def _answers(self, asked: Sequence[Asked], weights: WeightUpdate) -> tuple[list[Answer], int]:
        """The work of the thread for a generation."""
        if self._serving != weights.version:
            self._of_each(lambda server: server.update(weights, self._url(weights, server)))
            self._serving = weights.version
        answers = self._requests.map(lambda row: self._answer(row, asked[row], weights.version), range(len(asked)))
        return list(answers), weights.version

    def _url(self, weights: WeightUpdate, server: ServerAPI) -> str | None:
        """Where the server fetches the weights; None: from their folder."""
        offered = self._weight_server
        return None if offered is None else offered.url(weights.version, server.connection.address)

    def _answer(self, row: int, one: Asked, version: int) -> Answer:
        if self.conversations is not None:
            return self.conversations.hold(one, lambda turn: self._write(row, turn, version))
        return self._write(row, turn_of(self.run, one), version)

    def _write(self, row: int, turn: Turn, version: int) -> Answer:
        server = self.server_of_row[row]
        written = self.servers[server].write(turn.tokens, turn.room, turn.seed)
        if written.weight_version != (version if self.servers[server].names_weights else None):
            found = "of its own" if written.weight_version is None else written.weight_version
            raise self.servers[server].connection.error(
                f"answers by weights {found}, and was given {version}: another run, or a process beside it, gives it "
                "weights too, or it was started again; let one run have it"
            )
        return Answer(turn.tokens, written.tokens, written.logprobs, written.finished)

    def _of_each(self, work: Callable[[ServerAPI], None]) -> None:
        """Let all servers do something at the same time, and wait for them."""
        for _ in self._requests.map(work, self.servers):
            pass

    def close(self) -> None:
        """Ask for nothing more, and wait for nothing that was asked for."""
        if self.run.groups.world_rank == 0:
            self._in_turn.shutdown(wait=False, cancel_futures=True)
            self._requests.shutdown(wait=False, cancel_futures=True)
        for server in self.servers:
            server.connection.close()
        if self._weight_server is not None:
            self._weight_server.close()
