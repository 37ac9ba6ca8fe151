// The optimizers' kernels, block by block and thread by thread, against the formulas in fp64.
#include "../../cuda/optim_rules.h"
#include "../../cuda/optim_table.h"
#include "check.h"

using namespace dsl::cuda;

namespace {

// All blocks of all launches, the last one first: they may not depend on their order.
template <typename T, typename Rule>
int run(const Rule& rule, const Lists& lists, const Access& access, std::uint32_t threads) {
  auto table = std::make_unique<T>();
  int launches = 0;
  for (std::size_t next = 0; next < lists.numels->size(); ++launches) {
    next = fill(*table, lists, next);
    for (std::uint32_t chunk = table->chunks; chunk-- > 0;) {
      for (std::uint32_t thread = threads; thread-- > 0;) {
        step_chunk(rule, *table, access, chunk, thread, threads);
      }
    }
  }
  return launches;
}

struct Element {
  double p, g, first, second;
};

void adam(Element& e) {
  const double lr = 1e-2, beta1 = 0.9, beta2 = 0.99, eps = 1e-3, decay = 0.1;
  e.p *= 1 - lr * decay;
  e.first = beta1 * e.first + (1 - beta1) * e.g;
  e.second = beta2 * e.second + (1 - beta2) * e.g * e.g;
  const double c1 = 1 - std::pow(beta1, 3), c2 = 1 - std::pow(beta2, 3);
  e.p -= lr * (e.first / c1) / (std::sqrt(e.second / c2) + eps);
}
const Adam kAdam(1e-2, 0.9, 0.99, 1e-3, 0.1, true, 1 - std::pow(0.9, 3), 1 - std::pow(0.99, 3));

void coupled_adam(Element& e) {
  e.g += 0.1 * e.p;
  e.first = 0.3 * e.first + 0.7 * e.g;
  e.second = 0.99 * e.second + 0.01 * e.g * e.g;
  e.p -= 1e-2 * e.first / (std::sqrt(e.second) + 1e-3);
}
const Adam kCoupledAdam(1e-2, 0.3, 0.99, 1e-3, 0.1, false, 1.0, 1.0);

void lion(Element& e) {
  const double c = 0.9 * e.first + 0.1 * e.g;
  e.p = e.p * (1 - 1e-2 * 0.1) - 1e-2 * (c > 0 ? 1 : c < 0 ? -1 : 0);
  e.first = 0.99 * e.first + 0.01 * e.g;
}
const Lion kLion(1e-2, 0.9, 0.99, 0.1);

void adagrad(Element& e) {
  e.g += 0.1 * e.p;
  e.first += e.g * e.g;
  e.p -= 1e-2 * e.g / (std::sqrt(e.first) + 1e-3);
}
const Adagrad kAdagrad(1e-2, 1e-3, 0.1);

void sgd(Element& e) {
  e.g += 0.1 * e.p;
  e.first = 0.9 * e.first + 0.5 * e.g;
  e.p -= 1e-2 * (e.g + 0.9 * e.first);
}
const Sgd kSgd(1e-2, 0.9, 0.5, true, 0.1, false, true);

void first_sgd(Element& e) {
  e.first = e.g;
  e.p -= 1e-2 * e.g;
}
const Sgd kFirstSgd(1e-2, 0.9, 0.5, false, 0.0, true, true);

void plain_sgd(Element& e) { e.p -= 1e-2 * e.g; }
const Sgd kPlainSgd(1e-2, 0.0, 0.0, false, 0.0, false, false);

bool close(double actual, double expected, double epsilon) {
  return std::abs(actual - expected) <= epsilon * (4 + std::abs(expected));
}

struct Layout {
  Kind grad, state, copy;
  bool copies;
  std::uint32_t threads;
  bool agree;  // do the columns of a tensor begin at the same element after an aligned address?
};

template <typename Rule>
void compare(const Rule& rule, void (*formula)(Element&), const Layout& layout, int states) {
  const std::vector<std::size_t> numels = {
      0, 1, 3, 4, 5, 0, 9, 33, kChunk - 1, kChunk, kChunk + 3, 2 * kChunk + 5, 31};
  const std::size_t count = numels.size();
  std::vector<std::vector<Buffer>> columns(5);
  std::vector<std::vector<std::uintptr_t>> pointers(5);
  const Kind kinds[] = {Kind::kFloat32, layout.grad, layout.copy, layout.state, layout.state};
  for (std::size_t column = 0; column < 5; ++column) {
    const bool none = (column == kCopy && !layout.copies) ||
                      (column >= kState0 && static_cast<int>(column - kState0) >= states);
    if (none) continue;
    for (std::size_t t = 0; t < count; ++t) {
      const std::size_t offset = layout.agree ? t % 4 : (t + column * (t % 3)) % 4;
      columns[column].emplace_back(numels[t], kinds[column], offset);
      columns[column][t].fill(static_cast<std::uint32_t>(100 * column + t + 1));
      pointers[column].push_back(columns[column][t].pointer());
    }
  }
  std::vector<std::vector<Element>> expected(count);
  const float scale_on_device = 0.5f;
  const Access access{layout.grad, layout.state, layout.copy, 0.25f, &scale_on_device};
  for (std::size_t t = 0; t < count; ++t) {
    for (std::size_t i = 0; i < numels[t]; ++i) {
      if (states == 2 || std::is_same<Rule, Adagrad>::value) {
        Buffer& squares = columns[states == 2 ? kState1 : kState0][t];
        squares.set(i, std::abs(squares.get(i)));
      }
      Element e{columns[kParam][t].get(i), columns[kGrad][t].get(i) * 0.125, 0, 0};
      if (states > 0) e.first = columns[kState0][t].get(i);
      if (states > 1) e.second = columns[kState1][t].get(i);
      formula(e);
      expected[t].push_back(e);
    }
  }
  Lists lists{{&pointers[0], &pointers[1], &pointers[2], &pointers[3]}, &numels};
  if (Rule::kStates > 1) lists.columns.push_back(&pointers[4]);
  check_lists(lists, access, "test");
  const int launches = run<Table<Rule::kStates, 4>>(rule, lists, access, layout.threads);
  CHECK(launches == 3);  // 11 tensors with elements, four to a table
  for (std::size_t t = 0; t < count; ++t) {
    for (std::size_t i = 0; i < numels[t]; ++i) {
      const Element& e = expected[t][i];
      const float p = columns[kParam][t].get(i);
      // bf16 is rounded stochastically, up to a whole last digit.
      const double epsilon = epsilon_of(layout.state) * (layout.state == Kind::kFloat32 ? 1 : 2);
      CHECK(close(p, e.p, 0x1.0p-23));
      if (states > 0) CHECK(close(columns[kState0][t].get(i), e.first, epsilon));
      if (states > 1) CHECK(close(columns[kState1][t].get(i), e.second, epsilon));
      if (layout.copies) {
        CHECK(columns[kCopy][t].get(i) == decode(encode(p, layout.copy), layout.copy));
      }
    }
  }
}

void test_every_rule_equals_its_formula() {
  const Layout layouts[] = {
      {Kind::kFloat32, Kind::kFloat32, Kind::kFloat32, false, kThreads, true},
      {Kind::kBFloat16, Kind::kFloat32, Kind::kBFloat16, true, kThreads, true},
      {Kind::kFloat16, Kind::kBFloat16, Kind::kFloat16, true, kThreads, false},
      {Kind::kFloat32, Kind::kBFloat16, Kind::kFloat32, true, 1, true},
      {Kind::kBFloat16, Kind::kBFloat16, Kind::kBFloat16, false, 7, false},
  };
  for (const Layout& layout : layouts) {
    compare(kAdam, adam, layout, 2);
    compare(kCoupledAdam, coupled_adam, layout, 2);
    compare(kLion, lion, layout, 1);
    compare(kAdagrad, adagrad, layout, 1);
    compare(kSgd, sgd, layout, 1);
    compare(kFirstSgd, first_sgd, layout, 1);
    compare(kPlainSgd, plain_sgd, layout, 0);
  }
}

void test_every_chunk_finds_its_tensor() {
  std::vector<std::size_t> numels;
  for (std::size_t i = 0; i < 200; ++i) numels.push_back(i % 7 == 0 ? 0 : i * 1009 % 40000 + 1);
  const std::vector<std::uintptr_t> pointers(numels.size(), 64);
  const Lists lists{{&pointers, &pointers, &pointers, &pointers, &pointers}, &numels};
  Table<2, 76> table;
  std::size_t next = 0, last = 0;
  std::uint64_t elements = 0, expected = 0;
  for (const std::size_t numel : numels) expected += numel;
  while (next < numels.size()) {
    next = fill(table, lists, next);
    CHECK(table.count > 0 && table.count <= 76);
    CHECK(next > last);
    last = next;
    const Access access{Kind::kFloat32, Kind::kFloat32, Kind::kFloat32, 1.0f, nullptr};
    std::uint32_t previous = 0;
    for (std::uint32_t chunk = 0; chunk < table.chunks; ++chunk) {
      const std::uint32_t t = tensor_of(table, chunk);
      CHECK(t == previous || t == previous + 1);
      CHECK(table.first_chunk[t] <= chunk);
      CHECK(t + 1 == table.count || chunk < table.first_chunk[t + 1]);
      const Rows rows = rows_of(table, access, chunk);
      CHECK(rows.numel > 0 && rows.numel <= kChunk);
      elements += rows.numel;
      previous = t;
    }
    CHECK(previous + 1 == table.count);
  }
  CHECK(elements == expected);
}

void test_a_tensor_beyond_32_bits_takes_one_row() {
  const std::vector<std::size_t> numels = {3, (std::size_t{1} << 35) + 5, 7};
  const std::vector<std::uintptr_t> pointers(3, 64);
  const Lists lists{{&pointers, &pointers, &pointers, &pointers}, &numels};
  Table<1, 90> table;
  CHECK(fill(table, lists, 0) == 3);
  CHECK(table.count == 3);
  const Access access{Kind::kBFloat16, Kind::kFloat32, Kind::kFloat32, 1.0f, nullptr};
  const std::uint32_t last = table.first_chunk[2] - 1;
  const Rows rows = rows_of(table, access, last);
  CHECK(rows.numel == 5);
  CHECK(reinterpret_cast<std::uintptr_t>(rows.param) == 64 + (std::uintptr_t{1} << 37));
  CHECK(reinterpret_cast<std::uintptr_t>(rows.grad) == 64 + (std::uintptr_t{1} << 36));
  CHECK(rows_of(table, access, last + 1).numel == 7);
}

void test_aligned_columns_go_four_at_once() {
  const Access access{Kind::kBFloat16, Kind::kFloat32, Kind::kFloat16, 1.0f, nullptr};
  const auto at = [](std::uintptr_t address) { return reinterpret_cast<void*>(address); };
  for (std::uint32_t numel = 0; numel < 12; ++numel) {
    for (std::uintptr_t k = 0; k < 4; ++k) {
      const Rows rows{at(64 + 4 * k),  at(64 + 2 * k), at(128 + 2 * k),
                      at(256 + 4 * k), nullptr,        numel};
      const Quads quads = quads_of(rows, access);
      const std::uint32_t head = static_cast<std::uint32_t>((4 - k) % 4);
      if (numel > head) {
        CHECK(quads.begin == head);
        CHECK(quads.end == head + (numel - head) / 4 * 4);
      } else {
        CHECK(quads.begin == numel && quads.end == numel);
      }
    }
  }
}

void test_one_column_that_begins_elsewhere_leaves_no_quads() {
  const Access access{Kind::kBFloat16, Kind::kFloat32, Kind::kFloat16, 1.0f, nullptr};
  const auto at = [](std::uintptr_t address) { return reinterpret_cast<void*>(address); };
  const Rows good{at(64), at(64), at(64), at(64), at(64), 100};
  CHECK(quads_of(good, access).begin == 0 && quads_of(good, access).end == 100);
  Rows bad[5] = {good, good, good, good, good};
  bad[0].param = bad[1].state0 = bad[2].state1 = at(68);
  bad[3].grad = bad[4].copy = at(66);
  for (const Rows& rows : bad) CHECK(quads_of(rows, access).begin == 100);
}

template <typename Function>
bool throws(Function function) {
  try {
    function();
  } catch (const std::invalid_argument&) {
    return true;
  }
  return false;
}

void test_lists_that_do_not_fit_are_refused() {
  const Access access{Kind::kBFloat16, Kind::kFloat32, Kind::kFloat32, 1.0f, nullptr};
  const std::vector<std::uintptr_t> good = {64, 0, 128}, null = {64, 64, 0}, odd = {64, 64, 65},
                                    two = {64, 64}, none;
  const std::vector<std::size_t> numels = {5, 0, 7};
  const auto check = [&](const std::vector<std::uintptr_t>& grads,
                         const std::vector<std::uintptr_t>& copies) {
    check_lists(Lists{{&good, &grads, &copies, &good}, &numels}, access, "test");
  };
  check(good, none);
  check(good, good);
  CHECK(throws([&] { check(null, none); }));
  CHECK(throws([&] { check(odd, none); }));
  CHECK(throws([&] { check(two, none); }));
  CHECK(throws([&] { check(none, none); }));
  CHECK(throws([&] { check(good, two); }));
}

void test_tables_fit_in_kernel_parameters() {
  CHECK(capacity_of(2, kParameterBytes) == 76 && capacity_of(2, kManyParameterBytes) == 627);
  const std::size_t beside = sizeof(Adam) + sizeof(Access);
  CHECK((sizeof(Table<2, capacity_of(2, kParameterBytes)>) + beside <= kParameterBytes));
  CHECK((sizeof(Table<1, capacity_of(1, kManyParameterBytes)>) + beside <= kManyParameterBytes));
}

}  // namespace

int main() {
  test_every_rule_equals_its_formula();
  test_every_chunk_finds_its_tensor();
  test_a_tensor_beyond_32_bits_takes_one_row();
  test_aligned_columns_go_four_at_once();
  test_one_column_that_begins_elsewhere_leaves_no_quads();
  test_lists_that_do_not_fit_are_refused();
  test_tables_fit_in_kernel_parameters();
}
