# A C program with threads and a shared library, built by make -j2 and run; a static one too. Ends with "build ok".
set -eu
mkdir desk && cd desk
cat >part.c <<'C'
#include <pthread.h>
static void *add(void *sum) { for (int i = 0; i < 1000; i++) __atomic_add_fetch((int *)sum, 1, __ATOMIC_SEQ_CST); return 0; }
int total(void) {
    pthread_t threads[4];
    int sum = 0;
    for (int i = 0; i < 4; i++) pthread_create(&threads[i], 0, add, &sum);
    for (int i = 0; i < 4; i++) pthread_join(threads[i], 0);
    return sum;
}
C
printf '#include <stdio.h>\nint total(void);\nint main(void) { printf("%%d\\n", total()); return 0; }\n' >main.c
printf 'all: libpart.so main\nlibpart.so: part.c\n\tcc -shared -fPIC -pthread -O1 -o $@ $<\nmain.o: main.c\n\tcc -c -g $<\n' >Makefile
printf 'main: main.o libpart.so\n\tcc -o $@ main.o -L. -lpart -Wl,-rpath,$(CURDIR)\n' >>Makefile
make -s -j2
test "$(./main)" = 4000
cc -pthread -o one main.c part.c && test "$(./one)" = 4000
strip one && ar rcs libpart.a main.o && nm libpart.a >/dev/null
echo "build ok"
