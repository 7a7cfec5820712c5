/* A program whose library does it all. */

int early_library(void);

int main(void)
{
	return early_library();
}
