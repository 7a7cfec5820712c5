/* Each copy of this has variables of threads. */

static _Thread_local int counted[16];

int count_up(void);
int count_up(void)
{
	return ++counted[0];
}
