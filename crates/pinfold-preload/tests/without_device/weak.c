/* A program without libfabric that calls `fi_fabric` if there is one, twice, when it may open no file any more. */

#include "../check.h"

#include <linux/filter.h>
#include <linux/seccomp.h>
#include <stddef.h>
#include <stdio.h>
#include <sys/prctl.h>
#include <sys/syscall.h>

int fi_fabric(void *attributes, void **fabric, void *context) __attribute__((weak));

static void restrict_itself(void)
{
	static struct sock_filter rules[] = {
		BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, nr)),
		BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, SYS_openat, 0, 1),
		BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_KILL_PROCESS),
		BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW),
	};
	struct sock_fprog program = { sizeof(rules) / sizeof(*rules), rules };

	CHECK(!prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) && !prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &program));
}

int main(void)
{
	void *fabric;

	restrict_itself();
	if (!fi_fabric)
		return puts("none") < 0;
	for (int i = 0; i < 2; i++)
		printf("%d\n", fi_fabric(NULL, &fabric, NULL));
	return 0;
}
