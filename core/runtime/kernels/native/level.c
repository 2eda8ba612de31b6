/* Whether the system lets this process use the instructions that the library was compiled for. */
#if defined(__AMX_BF16__) && defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>

#define ARCH_REQ_XCOMP_PERM 0x1023
#define XFEATURE_XTILEDATA 18

/* Linux denies the tile unit to processes that did not request it (since 5.16). */
int allow_level(void) { return !syscall(SYS_arch_prctl, ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA); }
#elif defined(__AMX_BF16__)
int allow_level(void) { return 0; }
#else
int allow_level(void) { return 1; }
#endif
