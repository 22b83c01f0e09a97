// Minting the epoch of a session (rule 14). The clock that Redis shows may step back, its replica lags, it may be
// flushed or failed over. Up to four sessions of one user; each may be a zombie that still refreshes.
//
// Where the floor of a new epoch is kept, beside the stored one and the time:
//   IN_REDIS     nowhere else
//   IN_HELLO     each machine says the highest it ever had
//   IN_POSTGRES  `greatest(last + 1, time)` (what we do)
// What a refresh does when the stored epoch is not its own:
//   KEEP_MAXIMUM  writes its own if that is greater (what we do)
//   MINT_ANEW     takes a new epoch when none is stored
//   REFUSE        nothing
#include "checker.hpp"

enum Floor : uint8_t { IN_REDIS, IN_HELLO, IN_POSTGRES };
enum Refresh : uint8_t { KEEP_MAXIMUM, MINT_ANEW, REFUSE };

constexpr int SESSIONS_MAX = 4;
constexpr int TIME_MAX = 5;

struct Epochs {
  struct State {
    uint8_t time;
    uint8_t stored;    // in Redis; 0: the key is gone
    uint8_t replica;   // what the replica has of it
    uint8_t postgres;  // highest ever minted
    uint8_t hello[2];  // highest that each machine was given
    uint8_t sessions;
    uint8_t epoch[SESSIONS_MAX + 1], machine[SESSIONS_MAX + 1], ended[SESSIONS_MAX + 1];
    uint8_t stolen, not_greater;  // what must not happen
    uint8_t faults, steps_back;   // left
  };

  struct Options {
    Floor floor = IN_POSTGRES;
    Refresh refresh = KEEP_MAXIMUM;
    int machines = 1, faults = 2, steps_back = 0;
    bool flush = true, fail_over = true;
  } o;

  State first() const {
    State s{};
    s.time = 1;
    s.faults = o.faults;
    s.steps_back = o.steps_back;
    return s;
  }

  void canonical(State&) const {}

  uint8_t mint(const State& s, int machine) const {
    uint8_t epoch = std::max<uint8_t>(s.time, s.stored + 1);
    if (o.floor == IN_POSTGRES) epoch = std::max<uint8_t>(epoch, s.postgres + 1);
    if (o.floor == IN_HELLO) epoch = std::max<uint8_t>(epoch, s.hello[machine] + 1);
    return epoch;
  }

  static void remember(State& n, int machine, uint8_t epoch) {
    n.stored = epoch;
    n.postgres = std::max(n.postgres, epoch);
    n.hello[machine] = epoch;
  }

  void next(const State& s, Steps<State>& out) const {
    if (s.time < TIME_MAX) out.step(PROMPT, "the clock ticks to %d", s.time + 1, [](State& n) { n.time++; });
    if (s.faults) {
      if (s.stored && o.flush)
        out.step(FAULT, "Redis FLUSHED", [](State& n) {
          n.stored = n.replica = 0;
          n.faults--;
        });
      if (s.replica != s.stored && o.fail_over)
        out.step(FAULT, "FAIL-OVER to the replica (its epoch: %d)", s.replica, [&](State& n) {
          n.stored = s.replica;
          n.faults--;
        });
      if (s.steps_back && s.time > 2)
        out.step(FAULT, "the clock steps BACK by 2", [](State& n) {
          n.time -= 2;
          n.steps_back--;
          n.faults--;
        });
    }
    if (s.replica != s.stored) out.step(PROMPT, "replica catches up", [&](State& n) { n.replica = s.stored; });
    if (s.sessions < SESSIONS_MAX)
      for (int m = 0; m < o.machines; m++) connect(s, m, out);
    for (int i = 1; i <= s.sessions; i++)
      if (!s.ended[i]) live_on(s, i, out);
  }

  void connect(const State& s, int machine, Steps<State>& out) const {
    const uint8_t epoch = mint(s, machine);
    out.step(PROMPT, "session %d connects, epoch %d", s.sessions + 1, epoch, [&](State& n) {
      n.sessions++;
      n.time++;  // epochs are microseconds: no two connects in one
      n.epoch[n.sessions] = epoch;
      n.machine[n.sessions] = machine;
      for (int i = 1; i < n.sessions; i++)
        if (s.epoch[i] >= epoch) n.not_greater = 1;
      remember(n, machine, epoch);
    });
  }

  void live_on(const State& s, int i, Steps<State>& out) const {
    if (i < s.sessions)
      out.step(PROMPT, "worker of session %d notices that it is gone", i, [&](State& n) { n.ended[i] = 1; });
    if (o.refresh == KEEP_MAXIMUM && s.epoch[i] > s.stored)
      out.step(PROMPT, "session %d refreshes: raises the stored epoch to %d", i, s.epoch[i], [&](State& n) {
        n.stored = s.epoch[i];
        if (i < s.sessions && s.stored == s.epoch[s.sessions] && s.epoch[s.sessions] != s.epoch[i]) n.stolen = 1;
      });
    if (o.refresh == MINT_ANEW && s.stored == 0) {
      const uint8_t epoch = mint(s, s.machine[i]);
      out.step(PROMPT, "session %d refreshes, the key is gone: mints epoch %d", i, epoch, [&](State& n) {
        n.epoch[i] = epoch;
        remember(n, s.machine[i], epoch);
        for (int j = i + 1; j <= s.sessions; j++)
          if (s.epoch[j] <= epoch) n.not_greater = 1;
      });
    }
  }

  static constexpr const char* GREATER = "a newer session has a greater epoch than every older one";

  Claims<State> claims() const {
    return {
        {
            {GREATER, [](const State& s) { return !s.not_greater; }},
            {"an older session never takes the fence from the newest", [](const State& s) { return !s.stolen; }},
        },
        // The newest session holds the fence, or its worker has ended it.
        [](const State& s) { return s.sessions == 0 || s.stored == s.epoch[s.sessions] || s.ended[s.sessions]; },
        false,
    };
  }
};

using O = Epochs::Options;
constexpr auto GREATER = Epochs::GREATER;
void all_faults(O& o) {
  o.faults = 3;
  o.steps_back = 2;
  o.machines = 2;
}

const std::vector<Variant<Epochs>> VARIANTS = {
    {"postgres", holds(620323), all_faults},
    {"postgres-1-machine", holds(46583),
     [](O& o) {
       all_faults(o);
       o.machines = 1;
     }},
    {"redis-flushes", holds(6559),
     [](O& o) {
       o.floor = IN_REDIS;
       o.fail_over = false;
     }},
    {"redis-fail-overs", holds(6559),
     [](O& o) {
       o.floor = IN_REDIS;
       o.flush = false;
     }},
    {"redis-clock-back", holds(8721),
     [](O& o) {
       o.floor = IN_REDIS;
       o.steps_back = 2;
       o.flush = o.fail_over = false;
     }},
    {"hello-1-machine", holds(46583),
     [](O& o) {
       all_faults(o);
       o.floor = IN_HELLO;
       o.machines = 1;
     }},
    {"X-redis-flush-and-clock-back", breaks(GREATER, 409),
     [](O& o) {
       o.floor = IN_REDIS;
       o.steps_back = 1;
       o.fail_over = false;
     }},
    {"X-redis-fail-over-and-clock-back", breaks(GREATER, 419),
     [](O& o) {
       o.floor = IN_REDIS;
       o.steps_back = 1;
       o.flush = false;
     }},
    {"X-hello-2-machines", breaks(GREATER, 1991),
     [](O& o) {
       all_faults(o);
       o.floor = IN_HELLO;
     }},
    {"X-mint-anew", breaks(GREATER, 211),
     [](O& o) {
       o.floor = IN_REDIS;
       o.refresh = MINT_ANEW;
       o.fail_over = false;
     }},
    {"X-refuse-after-flush", breaks("resolves", 2744),
     [](O& o) {
       o.floor = IN_REDIS;
       o.refresh = REFUSE;
       o.fail_over = false;
     }},
    {"X-refuse-after-fail-over", breaks("resolves", 2744),
     [](O& o) {
       o.floor = IN_REDIS;
       o.refresh = REFUSE;
       o.flush = false;
       o.faults = 1;
     }},
};

int main(int argc, char** argv) { return run_variants(argc, argv, VARIANTS); }
