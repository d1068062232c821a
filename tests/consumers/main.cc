#include "decode.h"

int main(void) { return decode(); }
