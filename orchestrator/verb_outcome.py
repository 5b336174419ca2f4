"""How a verb ends: with an exit code, and one message for what its body raises."""

from __future__ import annotations

import gc
import sys
import traceback
from collections.abc import Callable

from orchestrator.config.build import ConfigError
from orchestrator.config.redact import Redactor, masked_output
from orchestrator.display.terminal import lasting_output
from orchestrator.user_code.errors import exits_refused
from orchestrator.verb_options import BAD_INPUT, FAILED, INTERRUPTED


def outcome(
    verb: str, body: Callable[[], int], redactor: Redactor, *, refused: tuple[type[Exception], ...] = ()
) -> int:
    """Run a verb whose output is masked; returns the exit code.

    Args:
        body: does the work, and returns the exit code if it raises nothing.
        refused: exceptions about what was asked for. The traceback of others is printed.
    """
    with lasting_output(), masked_output(redactor):
        try:
            with exits_refused(hard=True):
                return body()
        except refused as e:
            from orchestrator.display.plain_text import refuse

            return refuse(verb, e)
        except ConfigError as e:
            from orchestrator.display.report import errors_text

            print(errors_text(e.errors), file=sys.stderr)
            return BAD_INPUT
        except KeyboardInterrupt:
            return INTERRUPTED
        except Exception:
            traceback.print_exc()  # here, because the interpreter would print it unmasked
            return FAILED


def spare_garbage_search() -> None:
    """Keep the interpreter from searching torch's objects for garbage at its end, which takes a second.

    It is not in the module that Python runs, of which a debugger forgets the names before the end.
    """
    if "triton" not in sys.modules:  # triton reports each of its objects that are not collected as a leak
        gc.freeze()
