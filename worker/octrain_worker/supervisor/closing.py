"""The end of an attempt whose trainer is gone: store, ship, report, in this order.

What an outcome rests on reaches its place before the outcome does. Heartbeats go on meanwhile, so a
long upload does not cost the lease. Whatever interrupts this leaves ``outcome.json`` and the spool
for a successor.
"""

from __future__ import annotations

import functools
import logging
import threading
from dataclasses import replace
from enum import IntEnum

from fp8core.spec.outcomes import Outcome, Reason
from octrain_worker.api_client import ApiRefused, StaleAttempt, retrying
from octrain_worker.attempt_folder import AttemptFolder, write_private
from octrain_worker.clock import boot_time
from octrain_worker.settings import SupervisorSettings
from octrain_worker.supervisor.link import Link
from octrain_worker.supervisor.log_files import without_hole
from octrain_worker.supervisor.outcome import Verdict
from octrain_worker.supervisor.secrets import JobSecrets
from octrain_worker.supervisor.shipper import Shipper
from octrain_worker.supervisor.spool import Spool
from octrain_worker.supervisor.uploads import Upload, Uploads
from octrain_worker.supervisor.wakeup import Wakeup

__all__ = ["Closing", "ExitStatus", "disowned"]

logger = logging.getLogger(__name__)

_TICK_SECONDS = 0.05
_REFUSED_SECONDS = 5.0
_NOT_UNDERSTOOD = 422


class ExitStatus(IntEnum):
    """Of a supervisor's process."""

    DONE = 0
    NOT_OURS = 3
    # The attempt is not closed; what is needed to close it is in its folder.
    LEFT_FOR_SUCCESSOR = 4


def disowned(folder: AttemptFolder) -> ExitStatus:
    """The attempt is somebody else's, or over: nothing of it is needed here."""
    folder.finish("disowned")
    return ExitStatus.NOT_OURS


class Closing:
    """Closes one attempt. No process of its trainer lives any more."""

    def __init__(
        self,
        settings: SupervisorSettings,
        folder: AttemptFolder,
        link: Link,
        spool: Spool,
        shipper: Shipper,
        uploads: Uploads,
        wakeup: Wakeup,
        secrets: JobSecrets,
    ) -> None:
        self._settings = settings
        self._folder = folder
        self._link = link
        self._spool = spool
        self._shipper = shipper
        self._uploads = uploads
        self._wakeup = wakeup
        self._secrets = secrets

    def close(self, verdict: Verdict) -> ExitStatus:
        if verdict.detail is not None:
            verdict = replace(verdict, detail=self._secrets.mask(verdict.detail))
        self._link.end_of_training()
        self._remember(verdict)
        if not self._store_all():
            return self._left()
        problem = self._uploads.problem
        if problem is not None and verdict.outcome is Outcome.SUCCEEDED:
            verdict = replace(
                verdict,
                outcome=Outcome.FAILED,
                reason=Reason.STORAGE_FULL,
                detail=f"the run succeeded, but its results could not be stored: {problem}",
                resumable=False,
            )
            self._remember(verdict)
        if not self._ship_all():
            return self._left()
        return self._report(verdict)

    def _remember(self, verdict: Verdict) -> None:
        """For a successor. A disk that is full must not keep the outcome from being reported."""
        try:
            write_private(self._folder.outcome, verdict.as_json())
        except OSError as error:
            logger.error("the outcome cannot be written down: %s", error)

    def _store_all(self) -> bool:
        """Waits for the uploads, the logs' too, as long as their patience lasts."""
        for path in (self._folder.stdout, self._folder.stderr, self._folder.work / "crash.log"):
            try:
                if path.exists() and path.stat().st_size:
                    kept = self._folder.uploads / "logs"
                    whole = self._secrets.masked_file(without_hole(path, kept), kept)
                    self._uploads.add(Upload("log", path.name, whole))
            except OSError as error:
                self._link.note("artifact_lost", f"{path.name} is not kept: {error}")
        give_up_at = boot_time() + self._settings.upload_patience_seconds
        while not self._uploads.idle and boot_time() < give_up_at:
            if not self._tick():
                return False
        return True

    def _ship_all(self) -> bool:
        self._link.spool_notes(self._spool)
        self._shipper.hurry()
        while not self._shipper.drained:
            if not self._tick():
                return False
        return True

    def _report(self, verdict: Verdict) -> ExitStatus:
        link = self._link
        plain = False
        interrupted = threading.Event()
        self._watch_for_interruption(interrupted)
        while not interrupted.is_set():
            try:
                report = functools.partial(
                    link.client.finish, link.attempt_id, link.token, verdict.as_json()
                )
                status = retrying(report, stop=interrupted)
            except StaleAttempt as error:
                link.disown(str(error))
                return disowned(self._folder)
            except ApiRefused as error:
                logger.error("finish refused: %s", error)
                if error.status == _NOT_UNDERSTOOD and not plain:
                    plain, verdict = True, verdict.in_plain_words(str(error))
                    continue
                # A key that was withdrawn may be given back; the attempt is not lost for it.
                interrupted.wait(_REFUSED_SECONDS)
                continue
            if status is not None:
                logger.info("attempt %s: %s (%s)", link.attempt_id, verdict.outcome, verdict.reason)
                self._folder.finish("reported")
                return ExitStatus.DONE
        return self._left()

    def _watch_for_interruption(self, interrupted: threading.Event) -> None:
        """Sets the event at a second SIGTERM; the thread ends with the process."""

        def watch() -> None:
            while self._wakeup.terminations <= 1:
                if interrupted.wait(0.1):
                    return
            interrupted.set()

        threading.Thread(target=watch, name="interruption", daemon=True).start()

    def _tick(self) -> bool:
        """A moment of waiting; False when the process is to leave at once."""
        self._wakeup.wait(_TICK_SECONDS)
        self._link.spool_notes(self._spool)
        self._shipper.hurry()
        return self._wakeup.terminations <= 1 and self._link.stale is None

    def _left(self) -> ExitStatus:
        if self._link.stale is not None:
            return disowned(self._folder)
        logger.warning("attempt %s is left for a successor", self._folder.attempt_id)
        return ExitStatus.LEFT_FOR_SUCCESSOR
