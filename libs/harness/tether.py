"""Become a program that cannot outlive its parent; run as a script, in front of everything the harness starts.

    python -I -S tether.py PARENT_PID SIGNAL UID:GID|- FD PROGRAM [ARGUMENT...]

Switches to the account, asks the kernel (Linux) to send SIGNAL when the parent dies, and replaces itself by PROGRAM,
so that the pid stays the same. FD is closed at that moment, which tells the parent that it has come to pass.

A script of its own rather than a `preexec_fn`, because code between fork and exec may deadlock in a parent that has
threads. Where the kernel has no such request, the next start ends what was left behind (`harness.runner`).
"""

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1


def main(arguments: list[str]) -> None:
    """Exec the program; never returns. Exits with 127 when it cannot be run."""
    parent, signal_number, account, fd, *program = arguments
    if account != "-":
        uid, gid = (int(part) for part in account.split(":"))
        os.chdir("/")  # the inherited directory may be closed to the account
        os.setgroups([])
        os.setgid(gid)
        os.setuid(uid)
    # After the switch: a change of credentials clears the request.
    if sys.platform == "linux" and ctypes.CDLL(None, use_errno=True).prctl(
        PR_SET_PDEATHSIG, int(signal_number), 0, 0, 0
    ):
        sys.exit(f"prctl(PR_SET_PDEATHSIG): {os.strerror(ctypes.get_errno())}")
    # Before the request took hold the parent may have died already; then nobody would ever end the program.
    if os.getppid() != int(parent):
        sys.exit("the parent is gone")
    # This interpreter ignores SIGPIPE, and what is ignored stays ignored across exec.
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    os.set_inheritable(int(fd), False)
    try:
        os.execv(program[0], program)
    except OSError as error:
        print(f"cannot run {program[0]}: {error.strerror}", file=sys.stderr)
        sys.exit(127)


if __name__ == "__main__":
    main(sys.argv[1:])
