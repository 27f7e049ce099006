# ruff: noqa: E501 - a table: what stands in the product is quoted as it stands there
"""The guards of SQLite's writer process. See ``mutant_table.py``.

Those of ``writer_program.py`` are not here: it runs in a Python that loads nothing but the standard library, so a
mutant does not reach it. Its tests were seen to fail without them by hand.
"""

from __future__ import annotations

from tests.faults.mutant import Mutant
from tests.faults.mutant import mutant as _

WRITER, HELPER = "oncekey.stores.sqlite.writer_process", "oncekey.stores.sqlite.writer_helper"
PROCESS = "tests/stores/test_sqlite_writer_process.py"
STARTS = "tests/stores/test_sqlite_writer_starts.py"
ORPHANS = "tests/stores/test_sqlite_writer_orphans.py"

WRITERS: tuple[Mutant, ...] = (
    _(53, "I1", "the gate is taken before a batch is sent to the writer process", f"{PROCESS}::test_batch_waits_its_turn_behind_a_lane",
      (WRITER, "if not (gate.acquire(0.0, lane=True) or await gate.acquire_in_loop(self._lock_seconds, lane=True)):", "if False:")),
    _(53, "I1", "a writer process that does not answer is killed", f"{PROCESS}::test_process_that_hangs_is_killed_before_the_gate_is_given_back",
      (HELPER, "                self.kill()  # it may commit the batch, now or later\n", "                self._give_gate_back()\n")),
    _(53, "I1", "the gate is given back when the writer process is dead", f"{PROCESS}::test_gate_stays_taken_until_the_process_is_dead",
      (HELPER, "            self._leave()\n            self._end()\n", "            self._leave()\n            self._end()\n            self._give_gate_back()\n")),
    _(53, "I1", "a new writer process starts after the death of the old one", f"{PROCESS}::test_gate_stays_taken_until_the_process_is_dead",
      (WRITER, "if helper is None or helper.dead:", "if helper is None or helper.over:")),
    _(53, "I1", "a file has one writer process per app process", f"{STARTS}::test_one_file_has_one_process_per_app_process",
      (WRITER, "        if there is not None and there.in_use():\n            return None\n", "")),
    _(53, "I4", "a batch whose loop has ended leaves the gate free", f"{PROCESS}::test_loop_that_ended_during_a_batch_leaves_the_gate_free",
      (HELPER, "        else:\n            self._bury()\n", "")),
    _(53, "I4", "a batch is not given to a process that has ended", f"{PROCESS}::test_batch_whose_process_died_before_its_turn_is_left_to_the_lanes",
      (HELPER, "            self._holds_gate = not (self.dead or self.over)\n", "            self._holds_gate = True\n")),
    _(53, "I4", "the gate is given back without a thread", f"{PROCESS}::test_gate_is_given_back_if_no_thread_can_be_started",
      (HELPER, "        except RuntimeError:  # the system has no thread left\n            self._bury()\n", "        except RuntimeError:\n            pass\n")),
    _(53, "I4", "a dead writer process is not used again", f"{PROCESS}::test_death_of_an_idle_process_is_noticed_and_logged",
      (HELPER, "        if not data:\n            self._lost(", "        if False:\n            self._lost(")),
    _(53, "I4", "a writer process that fails is not started again at once", f"{STARTS}::test_process_that_cannot_start_is_tried_again_later_each_time",
      (WRITER, "if self._closed or time.monotonic() < self._next_start:", "if self._closed:")),
    _(53, "I4", "a closed writer starts no process", f"{STARTS}::test_closed_writer_starts_no_process",
      (WRITER, "if self._closed or time.monotonic() < self._next_start:", "if time.monotonic() < self._next_start:")),
    _(53, "I4", "a writer process that does not start is killed", f"{STARTS}::test_process_that_does_not_open_the_file_in_time_is_killed",
      (HELPER, "            START_SECONDS, self._lost, f\"did not open", "            3600, self._lost, f\"did not open")),
    _(53, "I2", "a writer process whose connection met an error is replaced", f"{PROCESS}::test_error_of_sqlite_ends_the_process_and_a_lock_does_not",
      (WRITER, "                helper.kill()\n                self._failed(", "                self._failed(")),
    _(53, "I4", "Ctrl-C does not reach the writer process", f"{PROCESS}::test_signals_that_are_for_the_app_do_not_end_the_process",
      (HELPER, "start_new_session=True", "start_new_session=False")),
    _(12, "I7", "a writer process opens no other file than its store", f"{STARTS}::test_process_writes_to_no_other_file_than_the_stores",
      (HELPER, "        if file != self._known:\n", "        if False:\n")),
    _(12, "I7", "a commit of a writer process into a file that is gone is not believed", f"{STARTS}::test_process_writes_to_no_other_file_than_the_stores",
      (WRITER, "            self._reading.compare_files(*helper.opened)\n", "            pass\n")),
    _(23, "I2", "a writer process commits with synchronous=FULL", f"{STARTS}::test_process_has_the_durability_of_the_store",
      (HELPER, "[*SETTINGS_OF_A_CONNECTION, *batches.SCRIPT", "[\"PRAGMA synchronous = NORMAL\", *batches.SCRIPT")),
    _(26, "I4", "a forked child does not keep its parent's writer process alive", f"{ORPHANS}::test_forked_child_does_not_keep_its_parents_process_alive",
      (HELPER, "        os.close(self.socket.detach())\n", "        self.socket.detach()\n")),
    _(26, "I1", "a forked child does not end its parent's writer process", f"{ORPHANS}::test_exit_of_a_forked_child_does_not_end_the_parents_process",
      (WRITER, "        writer.after_fork_in_child()\n", "        pass\n")),
)  # fmt: skip
