# bash without a terminal, pipes, job control, coreutils, findutils, grep, sed, awk. Ends with "shell ok".
set -euo pipefail
mkdir desk && cd desk
printf '%s\n' pear apple fig apple >fruit
test "$(sort fruit | uniq -c | sort -rn | awk 'NR == 1 { print $2 }')" = apple
sed -i 's/fig/plum/' fruit
grep -q plum fruit
diff <(sort fruit) <(sort fruit)
mkdir -p a/b/c && touch a/b/c/x && ln -s b/c a/link && ln fruit a/hard && mkfifo pipe
(echo through the pipe >pipe &)
test "$(cat pipe)" = "through the pipe"
test "$(find a -type f | xargs -n 1 basename | sort | tr '\n' ' ')" = "hard x "
sleep 0.05 &
wait $!
trap 'echo caught >caught' USR1
kill -USR1 $$
test -s caught
test "$(cat <<<"here")" = here
timeout 5 true
nice -n 1 true
nohup true >/dev/null 2>&1
seq 1000 | split -l 100 - part. && test "$(cat part.* | wc -l)" = 1000
head -c 100000 /dev/urandom >random && test "$(cat random | tee copy | sha256sum)" = "$(sha256sum <copy)"
truncate -s 1M sparse && dd if=sparse of=dense bs=64k status=none && cmp sparse dense
test "$(stat -c %a fruit)" = 644
date -u >/dev/null && uname -a >/dev/null && id >/dev/null && df . >/dev/null && du -s . >/dev/null
ps >/dev/null 2>&1 || true
mktemp -d >/dev/null
setsid -w true
echo "shell ok"
