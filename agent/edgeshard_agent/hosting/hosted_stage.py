"""One stage of one epoch, wired: the link in, the stage at work, the link out, and on the first
stage the head."""

from __future__ import annotations

import asyncio
from dataclasses import InitVar, dataclass, replace
from functools import partial

from edgeshard.domain.control.commands import PrepareStage
from edgeshard.domain.deployments.placement import Speculation
from edgeshard.domain.errors import EdgeShardError, FailedPreconditionError
from edgeshard.domain.nodes.device import StageGuesses, StagePhase, StageStatus
from edgeshard.domain.requests.step import MAX_STEP_TOKENS, ForwardStep, WireStep
from edgeshard.domain.requests.trace import StageTrace
from edgeshard.wire.frames import Frame, FrameContract, decode_guesses, encode_guesses
from edgeshard_agent.core.hanging import RunningStep
from edgeshard_agent.engine.pipeline_head import Epoch as HeadEpoch
from edgeshard_agent.engine.pipeline_head import Head, HeadLimits
from edgeshard_agent.engine.recording import StepCounts, StepRecorder
from edgeshard_agent.engine.stage_runner import StageRunner
from edgeshard_agent.hosting.around import Broken, HostServices, LoadedModel
from edgeshard_agent.net.attach import HeadStream
from edgeshard_agent.net.link_receiver import LinkReceiver
from edgeshard_agent.net.link_sender import Hop, LinkSender
from edgeshard_agent.scheduler.guessing import MOST_ROWS
from edgeshard_agent.scheduler.scheduler import HeadStep
from edgeshard_agent.scheduler.setup import make_scheduler, make_slices


@dataclass(eq=False)
class HostedStage:
    """Made when the weights are there; `start` opens the links, `activate` the head; `stop` closes
    all of it.

    A pipeline of one stage has no links: its finished steps go straight back into the head. The
    head outlives the stage.
    """

    prepare: PrepareStage
    loaded: LoadedModel
    around: HostServices
    on_broken: Broken
    former_head: InitVar[Head | None] = None
    """The head of the epoch before, whose requests continue."""

    def __post_init__(self, former_head: Head | None) -> None:
        prepare = self.prepare
        loaded = self.loaded
        around = self.around
        self._window = prepare.placement.window
        self._stage_count = len(prepare.placement.stages)
        self.sender = self._make_sender()
        """Its link to the next stage; None if it is the only one."""
        emulation = around.emulation
        pace = None if emulation is None else emulation.pace(loaded.model.layers, around.clock)
        guesses = prepare.placement.speculation is Speculation.GUESSES
        loaded.model.take_forced(MOST_ROWS - 1 if guesses else 0)
        self._runner = StageRunner(
            prepare.deployment,
            prepare.epoch,
            prepare.stage,
            loaded.model,
            around.worker,
            self,
            around.clock,
            pace,
        )
        self._runner.drafter = loaded.drafter
        if (sender := self.sender) is not None:
            self._runner.part_bytes = lambda: sender.part_bytes
        self._receiver: LinkReceiver | None = None
        self._recorder: StepRecorder | None = None
        self._stream: HeadStream | None = None
        self._stopped = False
        self.head = self._make_head(former_head) if prepare.stage == 0 else None

    def start(self) -> None:
        self._runner.start()
        if self.sender is not None:
            prepare = self.prepare
            self._receiver = self._make_receiver()
            self.around.servicer.open(prepare.deployment, prepare.stage, self._receiver)
            self.sender.start()

    async def activate(self) -> None:
        """Open the head: returns once the next stage is linked and the coordinator has taken the
        attach."""
        prepare = self.prepare
        if self.head is None:
            raise FailedPreconditionError(
                f"stage {prepare.stage} is not the first", reason="NOT_HEAD"
            )
        await self.head.prepare()
        if self.sender is not None:
            await self.sender.connected.wait()
        assert self._stream is not None
        self.head.open()
        self._stream.start(self.head)
        await self._stream.attached.wait()

    async def stop(self) -> None:
        self._stopped = True
        self.around.servicer.close(self.prepare.deployment, self.prepare.stage)
        if self.head is not None:
            self.head.pause()
        if self._stream is not None:
            await self._stream.stop()
        if self.sender is not None:
            await self.sender.stop()
        self._runner.stop()

    def status(self) -> StageStatus:
        active = self._stream is not None and self._stream.attached.is_set()
        status = self._runner.status(StagePhase.ACTIVE if active else StagePhase.READY)
        status = replace(status, load_s=self.loaded.load_s)
        if self.head is None:
            return status
        stats, guesses = self.head.stats, self.prepare.placement.speculation is Speculation.GUESSES
        return replace(
            status,
            requests_running=stats.running,
            requests_waiting=stats.waiting,
            micro_batches=stats.micro_batches,
            guesses=StageGuesses(stats.guesses, stats.right_guesses) if guesses else None,
        )

    @property
    def counts(self) -> StepCounts:
        """Counts of its steps, since the epoch began here."""
        return self._runner.counts

    @property
    def coordinator_suspicions(self) -> int | None:
        """The number of times that its head found the coordinator silent; None if it has no
        head."""
        return None if self._stream is None else self._stream.suspicions

    @property
    def received_bytes(self) -> int:
        """Payload of the frames that came over the link into it."""
        return 0 if self._receiver is None else self._receiver.received_bytes

    def running(self) -> RunningStep | None:
        """The step that computes now, with its time by the placement's costs."""
        running, costs = self._runner.running(), self.prepare.placement.costs
        if running is None or not costs:
            return None if running is None else running[0]
        step, plan = running
        pieces = [(span.first_position, span.token_count) for span in plan.spans]
        return replace(step, predicted_s=costs[self.prepare.stage].step_s(pieces))

    def fail(self, error: EdgeShardError) -> None:
        """Stop the stage for good with this error."""
        self._runner.fail(error)

    async def trace(self, seconds: float) -> StageTrace:
        """Record the steps of `seconds`. One at a time: a newer trace ends an older one, which
        returns the steps so far.
        """
        recorder = StepRecorder(self.around.clock)
        self._record_with(recorder)
        try:
            await asyncio.sleep(seconds)
        finally:
            if self._recorder is recorder:
                self._record_with(None)
        placed = self.prepare.placed
        return StageTrace(
            self.prepare.stage, placed.node_name, placed.layers, recorder.records, recorder.reads
        )

    def _record_with(self, recorder: StepRecorder | None) -> None:
        self._recorder = self._runner.recorder = recorder
        self.loaded.model.observe_reads(recorder)
        if self.sender is not None:
            self.sender.recorder = recorder
        if self._receiver is not None:
            self._receiver.recorder = recorder

    def freed(self) -> None:
        """Tell the coordinator early that KV blocks were freed."""
        self.around.changed()

    def send(self, step: WireStep, frames: list[Frame]) -> None:
        """A step the runner has finished: to the next stage, or home."""
        if self.sender is not None:
            self.sender.send(step, frames)
        else:
            self._received(step)

    def drafted(self, step: HeadStep) -> None:
        """Continue a step whose guesses the draft made."""
        if self.head is not None and not self._stopped:
            self.head.drafted(step)
        self._tell(step)

    def _offer(self, step: HeadStep) -> None:
        """Begin a step of the head here."""
        if not step.asks:
            self._tell(step)
        self._runner.offer(step)

    def _tell(self, step: HeadStep) -> None:
        """Send the guessed tokens to the stage that samples, whose link leads here, and to no other
        stage."""
        if self._receiver is not None and (guessed := step.guessed):
            self._receiver.tell(
                encode_guesses(self.prepare.deployment, self.prepare.epoch, step.number, guessed)
            )

    def _told(self, frame: Frame) -> None:
        step_guesses = decode_guesses(frame, self.prepare.deployment, self.prepare.epoch)
        if step_guesses is not None and self.loaded.model.is_last:
            self._runner.told.put(*step_guesses)

    def _received(self, step: WireStep) -> None:
        if self._stopped:
            return  # the head works for another epoch
        if isinstance(step, ForwardStep):
            self._runner.offer(step)
        elif self.head is not None:
            if self._recorder is not None:
                self._recorder.returned(step.number, step.result.right_guesses)
            self.head.on_return(step)

    def _repeated(self, step: int) -> None:
        if self.sender is not None and self.head is None:
            self.sender.repeat(step)

    def broke(self, error: EdgeShardError) -> None:
        """The runner or a link failed for good."""
        if self.head is not None:
            self.head.fail(error)
        self.on_broken(self.prepare.deployment, self.prepare.epoch)

    def _make_sender(self) -> LinkSender | None:
        if self._stage_count == 1:
            return None
        prepare = self.prepare
        to_stage = (prepare.stage + 1) % self._stage_count
        receiver = prepare.placement.stages[to_stage]
        hop = Hop(
            prepare.deployment,
            prepare.epoch,
            prepare.stage,
            to_stage,
            receiver.address,
            receiver.node_name,
        )
        around, window = self.around, self._window
        carrier = (
            None
            if around.emulation is None
            else around.emulation.carrier(receiver.node_name, window)
        )
        on_timing = (
            partial(around.links.heard, receiver.node_id) if around.links else lambda sample: None
        )
        return LinkSender(
            hop,
            window,
            around.tls,
            lambda error: self._runner.fail(error),
            carrier,
            on_timing,
            around.suspect,
            self._told,
        )

    def _make_receiver(self) -> LinkReceiver:
        prepare, shape = self.prepare, self.loaded.model.shape
        dtype, width = prepare.spec.dtype, 0 if prepare.stage == 0 else shape.frame_width
        passed = prepare.stage or self._stage_count
        contract = FrameContract(
            prepare.deployment, prepare.epoch, dtype, width, MAX_STEP_TOKENS, self._window, passed
        )
        from_stage = (prepare.stage - 1) % self._stage_count
        sender = prepare.placement.stages[from_stage].node_name
        return LinkReceiver(from_stage, sender, contract, self._received, self._repeated)

    def _make_head(self, former: Head | None) -> Head:
        prepare, shape = self.prepare, self.loaded.model.shape
        slices = make_slices(prepare)
        around = self.around
        for_head = self.loaded.for_head
        assert for_head is not None  # these layers begin the model
        self._stream = HeadStream(around.dial, around.node_id, prepare.deployment, prepare.epoch)
        drafts = self.loaded.drafter is not None
        scheduler = make_scheduler(prepare, shape, for_head.eos_tokens, slices, drafts)
        epoch = HeadEpoch(scheduler, self._offer, self._stream.emit, slices, self._runner.fail)
        if former is not None:
            former.begin(epoch)
            return former
        max_context = prepare.spec.max_context or shape.max_context
        most_new_tokens = prepare.spec.most_new_tokens(max_context)
        limits = HeadLimits(
            shape.vocab_size, most_new_tokens, max_context, around.text_memory_bytes
        )
        return Head(epoch, for_head.tokenizer, limits, around.clock.now)
