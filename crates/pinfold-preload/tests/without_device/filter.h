/* Filters of system calls, as programs set them for themselves. */

#ifndef FILTER_H
#define FILTER_H

#include "../check.h"

#include <linux/filter.h>
#include <linux/seccomp.h>
#include <stddef.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <unistd.h>

#define NUMBER BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, nr))
#define ON(number, action) BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, number, 0, 1), BPF_STMT(BPF_RET | BPF_K, action)
#define OTHERWISE(action) BPF_STMT(BPF_RET | BPF_K, action)
#define LENGTH(array) (sizeof(array) / sizeof(*(array)))

static inline void filter(struct sock_filter *rules, size_t count, int by_prctl)
{
	struct sock_fprog program = { count, rules };

	CHECK(!prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0));
	if (by_prctl)
		CHECK(!prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &program));
	else
		CHECK(!syscall(SYS_seccomp, SECCOMP_SET_MODE_FILTER, 0, &program));
}

#endif
