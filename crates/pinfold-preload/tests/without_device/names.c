/* A program with functions of its own under names that ISO C leaves to programs. None of them is the library's to call, also
 * with an argument: then `main` leaves before the process ends. */

#include "verbs.h"
#include <stdio.h>
#include <stdlib.h>

/* Of `pthread.h`, which declares some of them. */
void pthread_exit(void *result) __attribute__((noreturn));

static int calls;

#define OWN(name)                                                                                  \
	long name(void);                                                                           \
	long name(void)                                                                            \
	{                                                                                          \
		__atomic_add_fetch(&calls, 1, __ATOMIC_RELAXED);                                   \
		return 0;                                                                          \
	}

OWN(poll)
OWN(nanosleep)
OWN(sched_yield)
OWN(sched_setscheduler)
OWN(sched_get_priority_max)
OWN(getrlimit)
OWN(stat)
OWN(readlink)
OWN(prctl)

static void say_calls(void)
{
	printf("%d calls\n", __atomic_load_n(&calls, __ATOMIC_RELAXED));
}

int main(int count, char **arguments)
{
	static char memory[16 << 12] __attribute__((aligned(4096)));
	struct ibv_pd *pd = ibv_alloc_pd(ibv_open_device(NULL));

	for (int i = 0; i < 4; i++) {
		struct ibv_mr *mr = ibv_reg_mr(pd, memory, sizeof(memory), 1);

		if (!mr || ibv_dereg_mr(mr))
			return 1;
	}
	(void)arguments;
	atexit(say_calls);
	if (count > 1)
		pthread_exit(NULL);
	return 0;
}
