/* A program without libfabric that calls `fi_fabric` if there is one, twice, when it may open no file any more. */

#include "filter.h"
#include <stdio.h>

int fi_fabric(void *attributes, void **fabric, void *context) __attribute__((weak));

int main(void)
{
	static struct sock_filter rules[] = {
		NUMBER, ON(SYS_openat, SECCOMP_RET_KILL_PROCESS), OTHERWISE(SECCOMP_RET_ALLOW),
	};
	void *fabric;

	filter(rules, LENGTH(rules), 1);
	if (!fi_fabric)
		return puts("none") < 0;
	for (int i = 0; i < 2; i++)
		printf("%d\n", fi_fabric(NULL, &fabric, NULL));
	return 0;
}
