/* A library whose variable of each thread the C library has to find room for when it is loaded. */

static __thread int numbers[128] __attribute__((tls_model("initial-exec")));

int count_up(void);

int count_up(void)
{
	return ++numbers[77];
}
