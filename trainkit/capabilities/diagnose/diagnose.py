"""Diagnoses an attempt: finds the first failed rank, the root cause with evidence, and what to do.

A diagnosis reads the run folder but never changes it. The root cause in end.json and the ranks' failure
records take precedence. The logs are searched if the root cause and the records do not explain the failure,
for example because a rank was killed or only reports the failure of another rank. Events before the failure
are searched last.
"""

from __future__ import annotations

import signal
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import Any, Literal

from trainkit.capabilities.diagnose.advice import (
    collective_values,
    hang_values,
    host_values,
    missing_path_values,
    missing_rank_values,
    run_values,
)
from trainkit.capabilities.diagnose.attempt_files import MAX_LOGS, RANK_FILE, AttemptEvents, AttemptFiles
from trainkit.capabilities.diagnose.signatures import Role, fill, load_signatures
from trainkit.capabilities.diagnose.texts import Evidence, Match, Text, num_lines_of_message, record_text
from trainkit.formats import rank_list
from trainkit.job.failure.launcher_report import first_exit
from trainkit.observe.logs import clean
from trainkit.run.end import SIGNALLED, RankFailure, first_of, rank_failures, read_end, signal_name
from trainkit.run.record import JobRecord
from trainkit.run.rundir import AttemptDir, RunDir
from trainkit.run.tracebacks import CodeLine, exception_of, users_line
from trainkit.scheduler import JobInfo, JobState

MAX_EVIDENCE = 6
MAX_START = 200
"""Number of leading characters of an exception's first line that are used to find the line in a log file."""
TAIL_LINES = 20
STARTS_AGAIN = ("trainkit resume {resumable}", "{by_hand}")
"""Commands that restart a run. The placeholder ``by_hand`` is used for runs that trainkit did not start."""
OWN_SIGNALS = (signal.SIGABRT, signal.SIGSEGV, signal.SIGBUS, signal.SIGFPE, signal.SIGILL)
"""Signals that are caused by a crash of the process itself, whose output may contain the reason. Signals that
are not in this tuple are sent by other processes."""


@dataclass(frozen=True)
class Diagnosis:
    """Describes why an attempt failed or stopped. Fields that do not apply or are unknown are None."""

    run_dir: str
    attempt: int
    state: str
    """``failed`` or ``stopped``; ``running`` or ``finished`` if there was a problem without a failure;
    ``nothing failed``; or ``unknown`` if this host cannot determine the state."""
    name: str | None = None
    """The name of the signature, or ``exception`` for an error in the user's code; None if no known cause
    matches."""
    title: str = "unknown"
    cause: str = ""
    confidence: Literal["certain", "likely", "unknown"] = "unknown"
    rank: int | None = None
    host: str | None = None
    step: int | None = None
    time: str | None = None
    code: CodeLine | None = None
    """The line of the user's code at which the first failed rank raised its exception."""
    evidence: list[Evidence] = field(default_factory=list)
    advice: list[str] = field(default_factory=list)
    tail: list[Evidence] = field(default_factory=list)
    """The last lines of output of the first failed rank, if the cause is unknown or is an error in the user's
    code. For a failed start, the tail contains the last lines of the batch script's output."""
    events: list[Evidence] = field(default_factory=list)
    """The last events before the failure, if the cause is unknown or was found in an event."""
    earlier: list[str] = field(default_factory=list)
    """One line per earlier attempt that failed."""


def diagnose(
    attempt: AttemptDir, job: JobRecord, alive: bool | None = False, slurm_job: JobInfo | None = None
) -> Diagnosis:
    """Diagnose an attempt; `job` is the run's job record.

    `alive` says whether the job is still running, and `slurm_job` is the job's state in Slurm.
    """
    return _Case(attempt, job, alive, slurm_job).diagnosis()


@dataclass
class _First:
    """The first failure, read from the record of a rank or from the root cause in end.json."""

    failure: RankFailure
    text: Text
    log_rank: int | None = None
    """The rank whose log file contains the failed rank's output. A launcher such as torchrun writes one
    log file for all ranks of a node."""
    recorded: RankFailure = field(default_factory=RankFailure)
    """The failure as read from the record or from end.json."""
    reported: str = ""
    """The failure time in the launcher's output. The launcher's own failure record has a later time,
    at which the launcher itself exited. Empty unless the launchers of all nodes report a failure time."""

    @property
    def rank(self) -> int | None:
        return self.text.rank

    @property
    def host(self) -> str | None:
        return self.text.host

    def is_of(self, verdict: RankFailure) -> bool:
        """Return whether the root cause in end.json, `verdict`, was copied from this record."""
        own = self.recorded
        same = (own.rank, own.time, own.type) == (verdict.rank, verdict.time, verdict.type)
        return same and own.time is not None

    @property
    def is_exception(self) -> bool:
        """Return whether the record contains more than the exit code or signal of the failed process."""
        return self.failure.type not in ("exit", "RankKilled", None)

    @property
    def died_silently(self) -> bool:
        """Return whether the process was killed by another process or by the kernel.

        The output of a process does not contain the reason why another process or the kernel killed it.
        """
        number = (self.failure.exit_code or 0) - SIGNALLED
        return number in signal.Signals.__members__.values() and number not in OWN_SIGNALS


class _Case:
    def __init__(
        self, attempt: AttemptDir, job: JobRecord, alive: bool | None, slurm_job: JobInfo | None
    ) -> None:
        self.attempt, self.run = attempt, attempt.run
        self.alive, self.slurm_job = alive, slurm_job
        self.files = AttemptFiles(attempt, job, slurm_job)
        self.end = self.files.end
        self.has_ended = self.files.has_ended
        self.records = self._records()
        self.first = self._first()

    @cached_property
    def events(self) -> AttemptEvents:
        return AttemptEvents(self.attempt, None if self.first is None else self.first.failure.time)

    def diagnosis(self) -> Diagnosis:
        if self.end.state == "finished":
            return self._diverged("finished") or self._nothing("the run finished")
        job = self.slurm_job
        # If the job is pending again, the attempt was interrupted.
        is_over = job is not None and (job.state.is_terminal or job.state is JobState.REQUEUED)
        if not (self.has_ended or self.records or is_over or self.alive is False):
            silence = self._best(self.events.texts(only_lasting=True)) if self.alive else None
            if silence is not None:
                return replace(self._found(silence), state="running")
            if self.alive:
                return self._diverged("running") or self._nothing("the attempt is still running or pending")
            return self._make(
                state="unknown", cause="this host cannot determine whether the run is still running"
            )
        # A rank that fails after a stop request did not cause the stop.
        match = self._best(self.files.start_text()) or self._best([self.files.end_text()], ("cause",))
        match = match or self._explain()
        if match is not None:
            return self._found(match)
        if self.first is None and self.end.state == "stopped":
            return self._nothing(f"the run stopped: {self.end.reason}")
        return self._unknown()

    # Methods that collect the texts to search

    def _records(self) -> list[_First]:
        """Return the ranks' failure records, earliest first.

        If launchers wrote all records, the records are sorted by the failure times that the launchers report.
        """
        found = list[_First]()
        for path, recorded in rank_failures(self.attempt, self.files.job):
            failure, log = recorded, RANK_FILE.fullmatch(path.stem)
            # Old trainkit versions did not record the line of code, and an exception may have no traceback.
            if failure.code is None:
                lines = str(failure.more.get("traceback") or "").splitlines()
                if not lines and failure.type not in ("exit", "RankKilled", None):
                    lines = failure.log_tail
                failure = replace(failure, code=self._in_tree(users_line(lines)))
            text = record_text(path, self.run.path, failure)
            first = _First(failure, text, int(log[1]) if log else None, recorded)
            found.append(first if len(found) >= MAX_LOGS else self._of_launcher(first))
        if not all(one.reported for one in found):
            return [replace(one, reported="") for one in found]
        return sorted(found, key=lambda one: one.reported)

    def _of_launcher(self, first: _First) -> _First:
        """Complete a launcher's record with the first failed rank, which the launcher printed in its output.

        Current agents already record the first failed rank; agents of old trainkit versions did not.
        """
        failure, kind, message, code = first.failure, first.failure.type, first.failure.message, None
        if first.log_rank is None or not self.files.plan.is_command:
            return first
        text = next(self.files.logs("log", [self.attempt.rank_log(first.log_rank)]), None)
        root = None if text is None else first_exit(text.lines)
        # If the launcher prints no times and names the same rank as the record, the launcher's output adds
        # nothing to the record.
        if text is None or root is None or (not root.time and root.rank == first.log_rank):
            return first
        if kind == "RankKilled" and failure.was_signalled:
            return replace(first, reported=root.time)  # the agent has already recorded which rank was killed
        rank, index, exit_code = root.rank, root.index, root.code
        if rank is None and len(self.files.ranks_next_to(first.log_rank)) == 1:
            rank = first.log_rank
        if root.code < 0:
            kind, message = "RankKilled", f"killed by {signal_name(-root.code)}"
            exit_code = SIGNALLED - root.code
        elif root.rank is not None and (raised := exception_of(text.lines, root.rank)) is not None:
            index, kind, message, code = raised.index, raised.type, raised.message, self._in_tree(raised.code)
        elif first.is_exception:
            code = failure.code
        else:
            kind, message = "exit", f"ended with exit code {root.code}"
        failure = replace(failure, rank=rank, exit_code=exit_code, type=kind, message=message, code=code)
        line = replace(text.part(index, 1, "record"), lines=[clean(f"{kind}: {message}")], rank=rank)
        line = replace(line, host=failure.host or text.host)
        return replace(first, failure=failure, text=line, reported=root.time)

    def _in_tree(self, code: CodeLine | None) -> CodeLine | None:
        """Return `code` if its file is in the folder with the run's code, or None otherwise."""
        code = None if code is None else code.in_tree(self.files.job)
        return None if code is None or Path(code.file).is_absolute() else code

    def _first(self) -> _First | None:
        """Return the record with the root cause or, if no record contains it, the root cause itself.

        If there is no root cause, or if launchers report failure times, return the earliest record.
        """
        verdict = self.end.verdict
        if verdict is not None and verdict.type == "exit" and verdict.rank is verdict.node_rank is None:
            verdict = replace(verdict, host=None)  # `host` is the supervisor's host, which did not fail
        own = None if verdict is None else next((one for one in self.records if one.is_of(verdict)), None)
        if verdict is None or (own is not None and own.reported):
            times = [(one, one.reported or one.failure.time) for one in self.records]
            found = first_of([(one, replace(one.failure, time=time)) for one, time in times])
            # A rank that exited after a stop request has not failed, even if its agent received the request
            # too late.
            is_stop = verdict is None and self.end.state in ("stopped", "cancelled")
            return None if found is None or (is_stop and found[1].died_of_stop_signal) else found[0]
        text = record_text(self.attempt.end_file, self.run.path, verdict)
        return own or self._of_launcher(_First(verdict, text, text.rank))

    def _rank_logs(self) -> Iterator[Text]:
        """Yield the output of all ranks, first failed rank first."""
        paths = sorted(self.attempt.logs_dir.glob("rank-*.log"))
        if self.first is not None and self.first.log_rank is not None:
            own = self.attempt.rank_log(self.first.log_rank)
            paths.sort(key=lambda path: path != own)
        yield from self.files.logs("log", paths[:MAX_LOGS])

    # Methods that find the cause

    def _explain(self) -> Match | None:
        own = None
        if self.first is not None:
            own = self._best([self.first.text])
            own = own or self._best(self._rest_of_the_message(self.first), ("cause",))
            if self.end.guessed:
                known = self._best(self.files.of_slurm(), ("cause",))
                if known is not None and (own is None or known.signature.name != own.signature.name):
                    return known
            if own is not None and own.signature.role == "cascade":
                own = self._before_the_cascade() or own
            if own is not None and own.signature.role in ("cause", "fallback"):
                return own
            if own is None and self.first.is_exception:
                # The exception is known, but no signature explains it.
                return self._in_users_code() or self._best(self.files.curve_text())
        found = self._best(self.files.outside(), ("cause",))
        if found is None and (self.first is None or not self.first.died_silently):
            found = self._from_logs(own)
        if self.first is not None or not self.has_ended:
            found = found or self._best((*self.files.curve_text(), *self.events.texts()), ("cause",))
        return found or own or self._best(self.files.outside(), ("symptom", "cascade"))

    def _rest_of_the_message(self, first: _First) -> Iterator[Text]:
        """Yield the remaining lines of the message of an exception.

        A COMMAND's record contains only the first line of the message.
        """
        if first.log_rank is None or not first.is_exception:
            return
        for text in self.files.logs("log", [self.attempt.rank_log(first.log_rank)]):
            start = str(first.text.lines[0])[:MAX_START]
            found = [index for index, line in enumerate(text.lines) if start in line]
            if found:
                yield text.part(found[-1], num_lines_of_message(text.lines[found[-1] :]), "record")

    def _before_the_cascade(self) -> Match | None:
        """Find the first failure not caused by another, store it as `first`, and return its match."""
        for first in self.records:
            match = self._best([first.text])
            is_exit = match is not None and match.signature.role == "symptom"
            # If a launcher reports a killed rank, the launcher itself survived, so the job step was not
            # killed as a whole.
            counts = not first.died_silently or first.failure.type == "RankKilled"
            if match is None or match.signature.role == "cause" or (is_exit and counts):
                self.first = first
                return match or self._in_users_code()
        return None

    def _in_users_code(self) -> Match | None:
        """Return a match that classifies the first failure's exception as an error in the user's code.

        Returns None if the exception was not raised in the user's code.
        """
        first = self.first
        if first is None or not first.is_exception:
            return None
        is_of_user = first.failure.code is not None or self.files.plan.is_command
        return self._best([first.text], ("fallback",)) if is_of_user else None

    def _from_logs(self, own: Match | None) -> Match | None:
        """Return a cause found in the output of the first failed rank, or None if no cause is found.

        If it is uncertain which rank failed first, the output of all ranks is searched.
        """
        if self.first is None or own is None or own.signature.role == "cascade":
            texts = list(islice(self._rank_logs(), MAX_LOGS))
        else:
            alike = {other.log_rank for other in self.records if other.text.find(own.signature)}
            logs = islice(self._rank_logs(), MAX_LOGS)
            texts = [text for index, text in enumerate(logs) if index == 0 or text.rank in alike]
        found = self._best(texts, ("cause",))
        if found is None and (own is None or own.signature.role == "symptom"):
            # Output that a rank printed before it aborted explains more than the abort itself.
            found = self._best(texts, ("symptom", "cascade") if own is None else ("cascade",))
        return found

    def _best(
        self, texts: Iterable[Text], roles: Sequence[Role] = ("cause", "symptom", "cascade")
    ) -> Match | None:
        """Return the best match; matches are ordered by role, then by text, then by signature."""
        texts = list(texts)
        for role in roles:
            for text in texts:
                for signature in load_signatures():
                    if signature.role == role and text.kind in signature.where:
                        match = text.find(signature)
                        if match is not None:
                            return match
        return None

    # Methods that build the diagnosis

    def _found(self, match: Match) -> Diagnosis:
        signature, first = match.signature, self.first
        is_of_job = match.text.kind in ("end", "start")
        rank, host, step = None, match.groups.get("host"), self.end.step
        if not is_of_job:
            rank, host, step = self._place(match)
        values = run_values(self.files) | dict(match.groups)
        failure = RankFailure() if first is None or is_of_job else first.failure
        hosts = self.files.hosts
        if "nobody" in match.groups:
            rank = host = None
        values |= {
            "subject": _subject(rank, host),
            "num_hosts": str(len(hosts) or ""),
            "job_id": "" if self.slurm_job is None else self.slurm_job.job_id,
            "message": clean(failure.message or ""),
            "place": "" if failure.code is None else clean(failure.code.place),
            "reason": clean(str(self.end.reason or "")),
            **({} if rank is None else {"rank": str(rank)}),
            **({} if host is None else host_values(host, values.get("nodelist", ""))),
        }
        added, more = hang_values(self.files, match, rank)
        values |= added | missing_rank_values(self.files, match) | self._host_values(match)
        values |= self._silent_rank_values(match) | self.events.values()
        if self.files.diverged_since is not None:
            values["diverged_step"] = str(self.files.diverged_since)
        values |= self.files.advice(host, self.events.lasting)
        values |= collective_values(self.files, match, self._rank_logs())
        if "suspect_rank" in values:
            rank = int(values["suspect_rank"])
            # If `hosts` is empty, all ranks are on one host.
            host = self.files.host_of(rank) if hosts else host
        values |= missing_path_values(self.files, match)
        templates = signature.advice_for(is_command=self.files.plan.is_command)
        advice = [text for text in (fill(template, values) for template in templates) if text]
        hint = failure.hint
        if hint and match.text.kind == "record" and hint not in advice:
            advice.insert(0, hint)
        confidence = "likely" if match.text.kind == "log" else signature.confidence
        log = None
        if match.text.kind == "start":
            log = self.files.batch_log()
        elif signature.role == "fallback":
            log = self._own_log()
        evidence = [match.evidence]
        if first is not None and not is_of_job and first.text is not match.text:
            evidence.append(first.text.evidence(0))
        if signature.role == "fallback" and (curve := self._best(self.files.curve_text())):
            advice.append(
                f"the run has diverged since step {curve.groups['nan_step']}, which may be the cause"
            )
            evidence.append(curve.evidence)
        return self._make(
            name=signature.name,
            title=signature.title,
            cause=next(filter(None, (fill(cause, values) for cause in signature.causes)), signature.title),
            confidence=confidence,
            rank=rank,
            host=host,
            step=step if isinstance(step, int) else None,
            code=failure.code,
            evidence=(evidence + more)[:MAX_EVIDENCE],
            advice=advice,
            events=self.events.shown() if match.text.kind == "event" else [],
            tail=[] if log is None else self._tail(log),
        )

    def _diverged(self, state: str) -> Diagnosis | None:
        """Return a diagnosis if the loss diverged in an attempt that did not fail, or None otherwise."""
        match = self._best(self.files.curve_text())
        return None if match is None else replace(self._found(match), state=state)

    def _place(self, match: Match) -> tuple[int | None, str | None, int | None]:
        """Return the rank, host and step of a match; unknown values are taken from the first failure."""
        first = RankFailure() if self.first is None else self.first.failure
        step = first.step
        if "rank" in match.groups and match.groups["rank"].isdigit():
            rank = int(match.groups["rank"])
            return rank, match.groups.get("host") or self.files.host_of(rank), step
        if match.text.kind in ("slurm", "srun") and not match.signature.is_of_a_rank:
            return None, match.groups.get("host"), step
        if match.text.kind == "log" and (self.first is None or match.text.rank != self.first.log_rank):
            return match.text.rank, match.text.host, step
        own = None if self.first is None else self.first.rank
        host = first.host or self.files.host_of(own)
        if match.text.kind in ("agent", "srun") and match.groups.get("host"):
            host = match.groups["host"]
        return own, host or match.text.host, step

    def _silent_rank_values(self, match: Match) -> dict[str, str]:
        """Return the ranks of a hand-written training loop that have no failure record.

        The ranks of a hand-written loop have no agent that could record their failure.
        """
        if match.signature.name != "network" or not self.run.was_started_by_hand:
            return {}
        recorded = {first.rank for first in self.records}
        silent = [rank for rank in range(self.files.world_size) if rank not in recorded]
        return {"silent_ranks": rank_list(silent), "suspect_rank": str(silent[0])} if silent else {}

    def _host_values(self, match: Match) -> dict[str, str]:
        """Return the hosts whose ranks reported this cause, or an empty dict if all hosts are affected."""
        hosts = {first.text.host for first in self.records if first.text.find(match.signature)}
        if hosts and None not in hosts and hosts < set(self.files.hosts):
            return {"some_hosts": ", ".join(sorted(map(str, hosts)))}
        return {}

    def _unknown(self) -> Diagnosis:
        first = self.first
        rank, log = None if first is None else first.rank, self._own_log()
        tail = [] if log is None else self._tail(log)
        if first is None:
            what = "program" if self.run.was_started_by_hand else "supervisor"
            gone = f"the {what} was killed, or its host went down, before the end of the attempt was recorded"
            entry = self.files.job.of_attempt(self.attempt.number)
            if not entry.has_started:
                gone = "the job ended before the supervisor began"
            reason = clean(str(self.end.reason or gone))
            advice = [] if self.has_ended else self._resume_advice()
            cause = f"the cause is unknown: {reason}"
            return self._make(cause=cause, tail=tail, events=self.events.shown(), advice=advice)
        failure = first.failure
        host = failure.host or (None if rank is None else self.files.host_of(rank))
        return self._make(
            cause=f"{_subject(rank, host)} failed first; the cause is unknown. First line of the error: "
            f"{first.text.lines[0]}",
            rank=rank,
            host=host or None,
            step=failure.step,
            evidence=[first.text.evidence(0)],
            advice=[failure.hint] if failure.hint else [],
            tail=tail,
            events=self.events.shown(),
        )

    def _own_log(self) -> Text | None:
        """Return the output of the first failed rank, or None if only other ranks have output."""
        log = next(self._rank_logs(), None)
        return None if log and self.first and log.rank != self.first.log_rank else log

    def _resume_advice(self) -> list[str]:
        values = run_values(self.files)
        templates = (
            "the save of step {unsaved_step} began at {save_began} and was not completed",
            *(f"`{again}` continues from step {{newest_step}}" for again in STARTS_AGAIN),
            *(f"`{again}` starts the run again: {{starts_again}}" for again in STARTS_AGAIN),
        )
        return [text for one in templates if (text := fill(one, values | self.events.values()))]

    def _tail(self, text: Text) -> list[Evidence]:
        """Return a log's last lines, excluding lines after the exception of the first failure."""
        end, first = len(text.lines), None if self.first is None else self.first.text
        if first is not None and first.file == text.file and first.first_line and text.first_line:
            index = first.first_line - text.first_line
            if 0 <= index < end:
                end = index + num_lines_of_message(text.lines[index:])
        return [text.evidence(index) for index in range(max(0, end - TAIL_LINES), end)]

    def _nothing(self, cause: str) -> Diagnosis:
        return self._make(state="nothing failed", title="nothing failed", cause=cause, confidence="certain")

    def _make(self, **values: Any) -> Diagnosis:
        state = "stopped" if self.end.state in ("stopped", "cancelled") else "failed"
        time = (None if self.first is None else self.first.failure.time) or self.end.time
        return Diagnosis(
            run_dir=str(self.run.path),
            attempt=self.attempt.number,
            earlier=earlier_failures(self.run, self.attempt.number),
            **({"state": state, "time": time} | values),
        )


def earlier_failures(run: RunDir, before: int) -> list[str]:
    """Return one line for each failed attempt before attempt `before`, oldest first."""
    found = []
    for number in run.attempt_numbers():
        end = read_end(run.attempt(number)) if number < before else None
        if end is not None and end.verdict is not None:
            follows = "restarted" if end.resumes else "not restarted"
            code = end.verdict.code
            where = "" if code is None else f" ({code.place})"
            message = " ".join(end.verdict.line.split())
            found.append(clean(f"attempt {number} ({follows}): {message}{where}"))
    return found


def _subject(rank: int | None, host: object) -> str:
    where = f" on {host}" if host else ""
    return f"rank {rank}{where}" if rank is not None else f"the job{where}"
