"""The deployment that serves under a name, and the head that its requests go to."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from edgeshard.domain.deployments.deployment import DeploymentPhase
from edgeshard.domain.errors import (
    FailedPreconditionError,
    InvalidArgumentError,
    NotFoundError,
    UnavailableError,
)
from edgeshard.domain.ids import DeploymentName
from edgeshard_coordinator.control.requests.running_request import Attachment
from edgeshard_coordinator.core.values.state import DeploymentRecord, State


class ServedDeployments:
    """`state` returns the newest state; `attachments` are the streams of the heads that are
    attached, as they change."""

    def __init__(
        self, state: Callable[[], State], attachments: Mapping[DeploymentName, Attachment]
    ) -> None:
        self._state = state
        self._attachments = attachments

    def records(self) -> tuple[DeploymentRecord, ...]:
        return tuple(self._state().deployments.values())

    def ready(self) -> list[DeploymentRecord]:
        """A deployment of each name that is served now."""
        ready = [record for record in self.records() if record.phase is DeploymentPhase.READY]
        return list({record.served_name: record for record in reversed(ready)}.values())[::-1]

    def find(self, model: str, only: frozenset[str] | None = None) -> DeploymentRecord:
        """The deployment that serves `model`, by its name or its model's, and can take requests
        now. With `only`, only deployments count whose name or model is among these names.

        Raises NotFoundError, InvalidArgumentError, UnavailableError or FailedPreconditionError
        naming `model`.
        """
        record = self.record_of(model, only)
        self.attachment_of(record, may_wait=False)
        return record

    def record_of(self, model: str, only: frozenset[str] | None = None) -> DeploymentRecord:
        """The deployment that serves under this name; for replicas a ready one, if there is any.
        Raises as `replicas_of` does."""
        records = self.replicas_of(model, only)
        return next((record for record in records if self.is_ready(record)), records[0])

    def replicas_of(
        self, model: str, only: frozenset[str] | None = None
    ) -> tuple[DeploymentRecord, ...]:
        """The deployment that serves under this name, or all of its replicas. Raises NotFoundError
        or InvalidArgumentError naming `model`."""
        records = [
            r for r in self._state().deployments.values() if r.phase is not DeploymentPhase.DELETING
        ]
        if only is not None:
            records = [r for r in records if not only.isdisjoint((r.name, r.served_name, r.model))]
        for serving in (
            [record for record in records if record.name == model],
            [record for record in records if record.served_name == model],
            [record for record in records if record.model == model],
        ):
            names = sorted({record.served_name for record in serving})
            if len(names) > 1:
                raise InvalidArgumentError(
                    f"model {model} is served by several deployments; name one of "
                    f"{', '.join(names)}",
                    field="model",
                )
            if serving:
                return tuple(sorted(serving, key=lambda record: record.spec.replica))
        served = ", ".join(sorted({record.served_name for record in records})) or "nothing"
        raise NotFoundError(
            f"model {model[:80]!r} is not served here; served: {served}",
            field="model",
            reason="MODEL_NOT_SERVED",
        )

    def is_ready(self, record: DeploymentRecord) -> bool:
        """Whether the deployment takes requests now."""
        attachment = self._attachments.get(record.name)
        is_there = attachment is not None and attachment.epoch == record.epoch
        return is_there and record.phase is DeploymentPhase.READY and not record.delete_revision

    def attachment_of(self, record: DeploymentRecord, *, may_wait: bool) -> Attachment | None:
        """The stream of the deployment's head at its present epoch. None if there is none yet and a
        request `may_wait` for it, since the deployment has been ready before.

        Raises UnavailableError or FailedPreconditionError naming `model`.
        """
        attachment = self._attachments.get(record.name)
        is_there = attachment is not None and attachment.epoch == record.epoch
        if is_there and (may_wait or record.phase is DeploymentPhase.READY):
            return attachment
        if record.phase is DeploymentPhase.FAILED:
            why = record.failure.message if record.failure else "unknown"
            raise FailedPreconditionError(
                f"deployment {record.name} failed: {why}; delete it and deploy it again",
                field="model",
                reason="DEPLOYMENT_FAILED",
            )
        if may_wait and record.ever_ready:
            return None
        raise UnavailableError(
            f"deployment {record.name} is {record.phase}, not ready; try again",
            field="model",
            reason="DEPLOYMENT_NOT_READY",
            retry_after_s=1.0,
        )
