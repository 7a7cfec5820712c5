/* A program whose library does it all. */

/* ISO C leaves the name to programs. */
int environ = 7;

int early_library(void);

int main(void)
{
	return early_library();
}
