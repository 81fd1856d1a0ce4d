/* Calls every system call by its number, each in a child of its own with arguments that mean nothing, and reports what
 * came back. Also the two other doors into the kernel: the x32 numbers and the 32-bit `int $0x80`.
 *
 * One JSON object a line: {"name":"N","number":N,"result":R,"errno":E,"signal":S,"hung":B}; numbers, not names. */
#define _GNU_SOURCE
#include <errno.h>
#include <poll.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

struct answer { long result; int error; int done; };
static struct answer *shared;

/* Calls that end, stop or replace the caller whatever their arguments, so that nothing can be learned this way:
 * rt_sigreturn (restores a made-up stack), pause, vfork (shares the stack), exit, exit_group; uretprobe and uprobe, which
 * the kernel itself answers with SIGILL outside its own trampoline and does not show to filters. */
static int skipped(long number) {
    return number == 15 || number == 34 || number == 58 || number == 60 || number == 231 || number == 335 ||
           number == 336;
}

static void report(const char *prefix, long number, int status, int hung) {
    printf("{\"name\":\"%s%ld\",\"number\":%ld,\"result\":%ld,\"errno\":%d,\"signal\":%d,\"hung\":%s}\n", prefix, number,
           number, shared->result, shared->error, WIFSIGNALED(status) && !hung ? WTERMSIG(status) : 0, hung ? "true" : "false");
}

static void try(const char *prefix, long number, int legacy) {
    fflush(stdout);
    memset(shared, 0, sizeof *shared);
    pid_t child = fork();
    if (child < 0) {
        perror("fork");
        exit(2);
    }
    if (child == 0) {
        pid_t own = getpid();
        long result;
        if (legacy) {
            __asm__ volatile("int $0x80" : "=a"(result) : "a"(number), "b"(-1), "c"(-1), "d"(-1), "S"(-1), "D"(-1) : "memory");
            errno = result < 0 ? (int)-result : 0;
            if (result < 0) result = -1;
        } else {
            errno = 0;
            result = syscall(number, -1L, -1L, -1L, -1L, -1L, -1L);
        }
        if (getpid() != own) _exit(0); /* fork(2) returned twice */
        shared->result = result;
        shared->error = result == -1 ? errno : 0;
        shared->done = 1;
        _exit(0);
    }
    int status = 0, hung = 0;
    for (int spent = 0; waitpid(child, &status, WNOHANG) == 0; spent++) {
        if (shared->done) {
            waitpid(child, &status, 0);
            break;
        }
        if (spent > 300) {
            hung = 1;
            kill(child, SIGKILL);
            waitpid(child, &status, 0);
            break;
        }
        usleep(spent < 20 ? 100 : 1000);
    }
    report(prefix, number, status, hung);
}

int main(void) {
    shared = mmap(NULL, sizeof *shared, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    if (shared == MAP_FAILED) return 2;
    for (long number = 0; number <= 480; number++)
        if (!skipped(number)) try("n", number, 0);
    try("n", 100000, 0);
    /* x32: bit 30 of the number. write, execve's own number, socket, mount. */
    static const long x32[] = {1, 2, 41, 165, 272, 321, 520, 545};
    for (unsigned i = 0; i < sizeof x32 / sizeof *x32; i++) try("x32-", 0x40000000L + x32[i], 0);
    /* 32-bit numbers: write 4, open 5, mount 21, socketcall 102, unshare 310, bpf 357, socket 359. */
    static const long i386[] = {4, 5, 21, 102, 310, 357, 359};
    for (unsigned i = 0; i < sizeof i386 / sizeof *i386; i++) try("i386-", i386[i], 1);
    printf("{\"name\":\"end\"}\n");
    return 0;
}
