/*
 * Children, forked beside a thread that loads libraries, of a program that was started without libibverbs and libfabric.
 *
 *   children LOADED [LIBRARY]
 *
 * They call `fi_fabric`, which is not there; or what LIBRARY, with a libibverbs of its own, calls when it registers nothing,
 * as their parent has before.
 */

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
static void (*opens)(void);
static int (*registers)(int);

/* What failed before is told behind the second round. */
static void release_twice(void)
{
	opens();
	CHECK(!registers(0));
	opens();
	CHECK(!dlsym(RTLD_DEFAULT, "no_such_function") && !registers(0) && dlerror());
}

static int fails_in_child(void)
{
	void *fabric;

	if (!registers)
		return fi_fabric && fi_fabric(NULL, &fabric, NULL) == 0;
	opens();
	return registers(0);
}

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

	CHECK(count >= 2);
	library = names[1];
	if (count > 2) {
		void *handle = dlopen(names[2], RTLD_NOW | RTLD_LOCAL);

		CHECK(handle);
		opens = (void (*)(void))dlsym(handle, "opens_by_itself");
		registers = (int (*)(int))dlsym(handle, "registers_by_itself");
		CHECK(opens && registers);
		release_twice();
	}
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
			_exit(fails_in_child());
		}
		CHECK(child > 0 && waitpid(child, &status, 0) == child && !status);
	}
	puts("all ended");
	return 0;
}
