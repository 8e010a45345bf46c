/* A program that saves on the signal. */
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

static volatile sig_atomic_t stop;

static void note(int number) { stop = number; }

int main(void) {
    struct sigaction act = {.sa_handler = note};
    sigaction(SIGTERM, &act, NULL);
    sigaction(SIGUSR2, &act, NULL);
    char path[4096];
    snprintf(path, sizeof path, "%s/state.%s", getenv("TRAINKIT_JOB_RUN_DIR"), getenv("RANK"));
    int step = 0;
    FILE *state = fopen(path, "r");
    if (state) {
        if (fscanf(state, "%d", &step) != 1) step = 0;
        fclose(state);
    }
    printf("from %d\n", step);
    while (!stop) {
        printf("step %d\n", ++step);
        fflush(stdout);
        usleep(100000);
    }
    usleep(500000);
    state = fopen(path, "w");
    fprintf(state, "%d\n", step);
    fclose(state);
    printf("saved %d\n", step);
    return 75;
}
