// The checker's own test: a token that walks round a ring of five places. Its states, and what breaks, can be counted
// by hand.
#include "checker.hpp"

struct Ring {
  struct State {
    uint8_t place, stuck, laps, hand;
  };
  struct Options {
    int laps_max = 3;
    bool has_trap = false;      // place 3 may swallow the token for ever
    bool slow_corner = false;   // place 2 is left only when time passes
    bool hands_differ = false;  // canonical() leaves what nobody looks at
  } o;

  State first() const { return {}; }

  void canonical(State& n) const {
    if (!o.hands_differ) n.hand = 0;
  }

  void next(const State& s, Steps<State>& out) const {
    if (s.stuck || s.laps == o.laps_max) return;
    for (uint8_t hand = 0; hand < 2; hand++)
      out.step(o.slow_corner && s.place == 2 ? SLOW : PROMPT, "to place %d", (s.place + 1) % 5, [&](State& n) {
        n.place = (s.place + 1) % 5;
        n.laps += n.place == 0;
        n.hand = hand;
      });
    if (o.has_trap && s.place == 3) out.step(FAULT, "STUCK at place %d", s.place, [](State& n) { n.stuck = 1; });
  }

  static constexpr const char* TWO_LAPS = "never more than two laps";

  Claims<State> claims() const {
    return {
        {{TWO_LAPS, [](const State& s) { return s.laps <= 2; }}},
        [this](const State& s) { return s.laps == o.laps_max; },
        true,
    };
  }
};

using O = Ring::Options;

const std::vector<Variant<Ring>> VARIANTS = {
    // Two laps of five places, and the end.
    {"two-laps", holds(11), [](O& o) { o.laps_max = 2; }},
    // Either hand may carry the token, which nobody looks at: twice the states, but for the first one.
    {"two-hands", holds(21),
     [](O& o) {
       o.laps_max = 2;
       o.hands_differ = true;
     }},
    {"X-three-laps", breaks(Ring::TWO_LAPS, 16), [](O&) {}},
    {"X-trap", breaks(Checker<Ring>::RESOLVES, 13),
     [](O& o) {
       o.laps_max = 2;
       o.has_trap = true;
     }},
    {"X-slow-corner", breaks(Checker<Ring>::PROMPTLY, 11),
     [](O& o) {
       o.laps_max = 2;
       o.slow_corner = true;
     }},
};

int main(int argc, char** argv) { return run_variants(argc, argv, VARIANTS); }
