/* A library for LD_PRELOAD: notes each signal that a handler of a rank, or of what it started, is called for.

   A line of $TRAINKIT_JOB_RUN_DIR/heard-ATTEMPT-RANK: "rank" or "child", the signal, the name of its sender. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static struct sigaction theirs[65];
static pid_t program;
static int is_rank;
static char path[4096];

static int is_noted(int number) { return number == SIGTERM || number == SIGUSR2 || number == SIGINT; }

static ssize_t read_proc(pid_t pid, const char *name, char *text, size_t size) {
    char file[64];
    snprintf(file, sizeof file, "/proc/%d/%s", (int)pid, name);
    int fd = open(file, O_RDONLY | O_CLOEXEC);
    if (fd < 0) return 0;
    ssize_t length = 0, got;
    while ((size_t)length < size - 1 && (got = read(fd, text + length, size - 1 - length)) > 0) length += got;
    close(fd);
    return length;
}

__attribute__((constructor)) static void begin(void) {
    static char environ_of_parent[1 << 17];
    const char *run = getenv("TRAINKIT_JOB_RUN_DIR"), *attempt = getenv("TRAINKIT_JOB_ATTEMPT");
    const char *rank = getenv("RANK");
    if (!run || !attempt) return;
    program = getpid();
    ssize_t length = read_proc(getppid(), "environ", environ_of_parent, sizeof environ_of_parent);
    int of_rank = memmem(environ_of_parent, length, "\0RANK=", 6) != NULL;
    is_rank = rank != NULL && !of_rank;
    snprintf(path, sizeof path, "%s/heard-%s-%s", run, attempt, rank ? rank : "launcher");
}

static void note(int number, siginfo_t *info, void *context) {
    char sender[32] = "", line[128];
    ssize_t length = info->si_pid > 0 ? read_proc(info->si_pid, "comm", sender, sizeof sender) : 0;
    if (length > 0) sender[length - 1] = 0;
    const char *who = is_rank && getpid() == program ? "rank" : getenv("RANK") ? "child" : "launcher";
    int size = snprintf(line, sizeof line, "%s %d %s\n", who, number, *sender ? sender : "outside");
    int fd = open(path, O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0644);
    if (fd >= 0) {
        if (write(fd, line, size) < 0) { /* nothing to be done in a handler */ }
        close(fd);
    }
    struct sigaction *to = &theirs[number];
    if (to->sa_flags & SA_SIGINFO) to->sa_sigaction(number, info, context);
    else if (to->sa_handler != SIG_IGN && to->sa_handler != SIG_DFL) to->sa_handler(number);
}

static int set(int number, const struct sigaction *act, struct sigaction *old) {
    static int (*real)(int, const struct sigaction *, struct sigaction *);
    if (!real) real = (int (*)(int, const struct sigaction *, struct sigaction *))dlsym(RTLD_NEXT, "sigaction");
    if (!path[0] || !is_noted(number)) return real(number, act, old);
    struct sigaction before = theirs[number], now, was;
    if (!act) {
        int code = real(number, NULL, &was);
        if (old) *old = was.sa_sigaction == note ? before : was;
        return code;
    }
    now = *act;
    int has_handler = (act->sa_flags & SA_SIGINFO) || (act->sa_handler != SIG_DFL && act->sa_handler != SIG_IGN);
    if (has_handler) {
        theirs[number] = *act;
        now.sa_sigaction = note;
        now.sa_flags |= SA_SIGINFO;
    }
    int code = real(number, &now, &was);
    if (old) *old = was.sa_sigaction == note ? before : was;
    return code;
}

int sigaction(int number, const struct sigaction *act, struct sigaction *old) { return set(number, act, old); }

void (*signal(int number, void (*handler)(int)))(int) {
    struct sigaction act = {.sa_handler = handler, .sa_flags = SA_RESTART}, old;
    sigemptyset(&act.sa_mask);
    return set(number, &act, &old) ? SIG_ERR : old.sa_handler;
}
