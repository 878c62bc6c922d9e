"""What a provider runs inside a machine that has processes of its service's own: switching users, and telling the
task's processes from the service's. The scripts need ``sh``, ``id``, ``kill`` and ``/proc``."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

# $1 the user, then the command. Exit code 126 is the contract's for a user that the machine does not have.
_AS_USER = """
user=$1; shift
case $user in
  *[!0-9]*) id -u -- "$user" >/dev/null 2>&1 || { echo "no user $user in the sandbox" >&2; exit 126; } ;;
esac
uid=$(id -u -- "$user" 2>/dev/null || echo "$user")
gid=$(id -g -- "$user" 2>/dev/null || echo "$user")
if setpriv --version >/dev/null 2>&1; then
  exec setpriv --reuid "$uid" --regid "$gid" --clear-groups -- "$@"
elif chroot --version >/dev/null 2>&1; then
  exec chroot --userspec "$uid:$gid" --groups "" / "$@"
fi
echo "the image has no setpriv and no chroot that can switch to the user $user" >&2
exit 126
"""

# "pid:start" of every process, so that one can be told from a later one with its number. Where the kernel's own threads
# are seen (flag 0x200000), they come and go, and nothing kills them.
_LIST = """
for stat in /proc/[0-9]*/stat; do
  { read -r line < "$stat"; } 2>/dev/null || continue
  pid=${line%% *}; set -- ${line##*) }
  [ "$pid" = "$$" ] || [ "$1" = Z ] || [ $(($7 / 2097152 % 2)) = 1 ] || echo "$pid:${20}"
done
"""

# The programs that a whole sandbox is made with; each that is missing is one word of output.
_LACKS = """
for tool in cat chmod grep mkdir mv rm stat tar; do
  command -v "$tool" >/dev/null 2>&1 || echo "lacks:$tool"
done
"""

# $1 the signal, then the processes to spare, as listed above; what started this shell is none of the task's either.
# For KILL again and again, for what was starting meanwhile. Says when it is done: what an agent put in the place of the
# shell may end well, too.
_SIGNAL = """
signal=$1; shift
spare=" $* "
own=" "; at=$$
while [ -n "$at" ] && [ "$at" -gt 1 ]; do
  own="$own$at "
  { read -r line < "/proc/$at/stat"; } 2>/dev/null || break
  set -- ${line##*) }; at=$2
done
n=0
while [ $n -lt 100 ]; do
  found=
  for stat in /proc/[0-9]*/stat; do
    { read -r line < "$stat"; } 2>/dev/null || continue
    pid=${line%% *}; set -- ${line##*) }
    [ "$pid" = 1 ] || [ "$1" = Z ] || [ $(($7 / 2097152 % 2)) = 1 ] && continue
    case $own in *" $pid "*) continue ;; esac
    case $spare in *" $pid:${20} "*) continue ;; esac
    found=1; kill "-$signal" "$pid" 2>/dev/null
  done
  [ -z "$found" ] || [ "$signal" != KILL ] && echo "every process was signalled" && exit 0
  n=$((n+1))
done
echo "processes keep appearing" >&2
exit 1
"""


def as_user(user: str | None, argv: Sequence[str]) -> list[str]:
    """The command, run by root, that runs ``argv`` as another user (a name or a number); None is root itself."""
    return [*argv] if user is None else ["/bin/sh", "-c", _AS_USER, "sh", user, *argv]


def list_processes() -> list[str]:
    """The command that prints one word for each running process, which no later process shares."""
    return ["/bin/sh", "-c", _LIST]


def look_around() -> list[str]:
    """The command that prints what :func:`list_processes` does, and what :func:`seen` tells from it."""
    return ["/bin/sh", "-c", _LACKS + _LIST]


def seen(words: Iterable[str]) -> tuple[list[str], str]:
    """Of what :func:`look_around` printed, the processes, and the names of programs that there are not."""
    found = [*words]
    lacking = [word.removeprefix("lacks:") for word in found if word.startswith("lacks:")]
    return [word for word in found if not word.startswith("lacks:")], ", ".join(lacking)


def signal_processes(signal: str, spare: Iterable[str]) -> list[str]:
    """The command, run by root, that sends a signal (``KILL``, ``STOP``, ...) to every process but the first one, its
    own ancestors, and those that :func:`list_processes` named ``spare``. See :func:`signalled`."""
    return ["/bin/sh", "-c", _SIGNAL, "sh", signal, *spare]


def signalled(output: bytes) -> bool:
    """Whether what :func:`signal_processes` printed says that it did its work."""
    return output.strip() == b"every process was signalled"
