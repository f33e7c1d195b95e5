# What a program finds around it: home, temporary files, locale, user, input at its end, no terminal. Prints facts.
set -eu
echo "home=$HOME"
echo "cwd=$(pwd)"
echo "tmp=$TMPDIR"
echo "user=$(id -un)/$(whoami)"
echo "lang=$(locale 2>/dev/null | grep -c 'LC_CTYPE="C.UTF-8"')"
echo "utf8=$(printf 'é' | wc -m)"
echo "stdin=$(cat | wc -c)"
if [ -t 0 ] || [ -t 1 ] || [ -t 2 ]; then echo "terminal=yes"; else echo "terminal=no"; fi
if (: </dev/tty) 2>/dev/null; then echo "tty=yes"; else echo "tty=no"; fi
echo "interactive=$(bash -i -c 'echo works' 2>/dev/null)"
touch "$HOME/mine" "$TMPDIR/mine" /dev/shm/mine
echo "getent=$(getent passwd "$(id -u)" | cut -d: -f6)"
