// The library that library_test loads.
extern "C" __attribute__((visibility("default"))) int sheaf_test_answer(int add) {
  return 40 + add;
}
