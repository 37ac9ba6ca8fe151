// The CPU ops on awkward sizes and addresses, for a build with sanitizers (DS_LIGHTNING_SANITIZE).
#include <cstdio>

void test_optim();
void test_reduce();

int main() {
  const struct {
    const char* name;
    void (*run)();
  } tests[] = {{"reduce", test_reduce}, {"optim", test_optim}};
  for (const auto& test : tests) {
    std::printf("%s\n", test.name);
    std::fflush(stdout);
    test.run();
  }
  return 0;
}
