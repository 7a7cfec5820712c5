/* Children, forked beside a thread that loads libraries, that call `fi_fabric` of a program without libfabric. */

#include "../check.h"

#include <dlfcn.h>
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdio.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

enum { CHILDREN = 100 };

int fi_fabric(void *attributes, void **fabric, void *context) __attribute__((weak));

static const char *library;
static atomic_int loaded;

static void *loads(void *unused)
{
	(void)unused;
	for (;;) {
		void *handle = dlopen(library, RTLD_NOW);

		CHECK(handle && !dlclose(handle));
		loaded++;
	}
	return NULL;
}

int main(int count, char **names)
{
	pthread_t thread;
	void *fabric;

	CHECK(count == 2);
	library = names[1];
	CHECK(!pthread_create(&thread, NULL, loads, NULL));
	for (int i = 0; i < CHILDREN; i++) {
		int status, before = loaded;
		pid_t child;

		while (loaded == before)
			;
		child = fork();
		if (!child) {
			/* One that hangs ends with its parent. */
			prctl(PR_SET_PDEATHSIG, SIGKILL);
			_exit(fi_fabric && fi_fabric(NULL, &fabric, NULL) == 0);
		}
		CHECK(child > 0 && waitpid(child, &status, 0) == child && !status);
	}
	puts("all ended");
	return 0;
}
