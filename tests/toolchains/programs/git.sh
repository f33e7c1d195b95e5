# git: clone the repository $1, commit, branch, merge, stash, gc, push to a bare one beside. Ends with "git ok".
set -eu
mkdir desk && cd desk
export GIT_AUTHOR_NAME=job GIT_AUTHOR_EMAIL=job@example.com GIT_COMMITTER_NAME=job GIT_COMMITTER_EMAIL=job@example.com
git clone -q "$1" work && cd work
test -s README
git switch -q -c topic && echo two >two && git add . && git commit -q -m two
git switch -q - && echo three >three && git add . && git commit -q -m three
git merge -q -m merged topic && test -s two -a -s three
echo dirty >>README && git stash -q && git stash pop -q && git checkout -q README
git init -q --bare ../bare && git push -q ../bare HEAD:refs/heads/main
git worktree add -q ../other topic && git gc -q && git fsck --no-progress && git log --oneline | wc -l
git status --porcelain && git diff HEAD~1 --stat >/dev/null && git blame README >/dev/null
echo "git ok"
