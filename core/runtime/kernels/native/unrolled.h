/* One function for each small number of rows, and the choice among them at run time.
 *
 * UP_TO(N, X) is X(1) X(2) ... X(N). A loop whose rows are counted by a constant keeps its sums in
 * registers; each has a separate function, because GCC allocates registers badly to many such loops
 * in one function.
 */
#pragma once

#define UP_TO_2(X) X(1) X(2)
#define UP_TO_3(X) UP_TO_2(X) X(3)
#define UP_TO_4(X) UP_TO_3(X) X(4)
#define UP_TO_6(X) UP_TO_4(X) X(5) X(6)
#define UP_TO_8(X) UP_TO_6(X) X(7) X(8)
#define UP_TO_12(X) UP_TO_8(X) X(9) X(10) X(11) X(12)
#define UP_TO_(N, X) UP_TO_##N(X)
#define UP_TO(N, X) UP_TO_(N, X)

/* UP_TO_OF(N, X, Y) is X(1, Y) X(2, Y) ... X(N, Y), for the sizes of `FEW`. */
#define UP_TO_OF_4(X, Y) X(1, Y) X(2, Y) X(3, Y) X(4, Y)
#define UP_TO_OF_8(X, Y) UP_TO_OF_4(X, Y) X(5, Y) X(6, Y) X(7, Y) X(8, Y)
#define UP_TO_OF_(N, X, Y) UP_TO_OF_##N(X, Y)
#define UP_TO_OF(N, X, Y) UP_TO_OF_(N, X, Y)

#define OWN static __attribute__((noinline)) void
#define CASE(N) case N: CALL(N); break;
