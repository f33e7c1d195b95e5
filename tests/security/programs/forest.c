/* forest SIZE: what `trees.py forest SIZE` makes, of processes that are as small as they can be.

   Says "up" once it stands. Every process ends by itself after LIFE_S. */
#include <signal.h>
#include <stdlib.h>
#include <sys/wait.h>
#include <unistd.h>

#define LIFE_S 45

static void linger(void)
{
    alarm(LIFE_S);
    for (;;)
        pause();
}

int main(int count, char **words)
{
    int size = count > 1 ? atoi(words[1]) : 1;
    for (int number = 1; number < size; number++) {
        pid_t pid = fork();
        if (pid < 0)
            return 1;
        if (pid == 0) {
            if (number % 2 == 0)
                linger();
            setsid();
            if (fork() == 0)
                linger();
            _exit(0);
        }
        if (number % 2)
            waitpid(pid, NULL, 0);
    }
    if (write(1, "up\n", 3) != 3)
        return 1;
    linger();
}
