// `on_machine_change: wait` in the window (rules 3a, 4, 13). Three unhinted jobs of one user whose two machines take
// turns. A job that was begun on the other machine waits for it, parked. Calls are atomic here (window.cpp has them in
// steps).
#include "checker.hpp"

enum Record : uint8_t { QUEUED = 1, BEGUN, TERMINAL };
enum Entry : uint8_t { UNREAD, PENDING, PENDING_BEFORE };  // ..._BEFORE: with a session that has ended
enum Held : uint8_t { NONE, WAITING, SENT, PARKED };       // by the live session
enum Owed : uint8_t { NOTHING, CLAIM, REST_OF_CLAIM };

constexpr int JOBS = 3;

struct Parking {
  struct State {
    uint8_t record[JOBS], begun_on[JOBS], entry[JOBS], executions[JOBS], held[JOBS];
    uint8_t handed_out[JOBS];  // how often in this session
    uint8_t row[2][JOBS];      // of each machine's journal
    uint8_t live;              // machine that is connected (1, 2), 0: none
    uint8_t last;              // the one before it
    uint8_t owed, faults;
  };

  struct Options {
    int window = 1, faults = 3;
    bool parked_takes_a_place = false;
    bool parked_is_in_flight = true;  // its id is passed to the claim, which leaves it out
    bool park = true;                 // else the mark is tried again and again
  } o;

  State first() const {
    State s{};
    for (uint8_t& record : s.record) record = QUEUED;
    s.faults = o.faults;
    return s;
  }

  void canonical(State&) const {}

  int free_places(const State& s) const {
    int used = 0;
    for (uint8_t held : s.held) {
      if (held == SENT) return 0;
      used += held == WAITING || (o.parked_takes_a_place && held == PARKED);
    }
    return std::max(o.window - used, 0);
  }

  static void hand_out(State& n, int job) {
    n.held[job] = WAITING;
    if (n.handed_out[job] < 3) n.handed_out[job]++;
  }

  void next(const State& s, Steps<State>& out) const {
    if (!s.live) {
      for (int m = 1; m <= 2; m++)
        out.step(s.last == 0 || s.last == m ? PROMPT : FAULT, "machine %d connects, asserts", m, [&](State& n) {
          n.live = n.last = m;
          n.owed = CLAIM;
        });
      if (s.last)
        out.step(PROMPT, "the other machine comes instead", [&](State& n) {
          n.live = n.last = 3 - s.last;
          n.owed = CLAIM;
        });
      return;
    }
    if (s.faults)
      out.step(FAULT, "session ends, machine %d may be gone", s.live, [](State& n) {
        n.faults--;
        memset(n.held, 0, JOBS);
        memset(n.handed_out, 0, JOBS);
        n.live = 0;
        for (uint8_t& entry : n.entry)
          if (entry) entry = PENDING_BEFORE;
      });
    take(s, out);
    deliver(s, out);
  }

  void take(const State& s, Steps<State>& out) const {
    const int free = free_places(s);
    if (s.owed == CLAIM || (s.owed == REST_OF_CLAIM && free))
      out.step(PROMPT, "claim", [&](State& n) {
        n.owed = NOTHING;
        int places = free;
        for (int k = 0; k < JOBS; k++) {
          if (!s.entry[k] || s.record[k] == TERMINAL) continue;
          n.entry[k] = PENDING;
          const bool in_flight = s.held[k] && (s.held[k] != PARKED || o.parked_is_in_flight);
          if (in_flight) continue;
          if (places) {
            places--;
            hand_out(n, k);
          } else {
            n.owed = REST_OF_CLAIM;
          }
        }
      });
    const bool unread = std::any_of(s.entry, s.entry + JOBS, [](uint8_t entry) { return entry == UNREAD; });
    if (s.owed == NOTHING && free && unread)
      out.step(PROMPT, "take", [&](State& n) {
        int places = free;
        for (int k = 0; k < JOBS && places; k++) {
          if (s.entry[k] != UNREAD) continue;
          places--;
          n.entry[k] = PENDING;
          hand_out(n, k);
        }
      });
    if (s.owed == NOTHING) out.step(SLOW, "heartbeat: claim again", [](State& n) { n.owed = CLAIM; });
  }

  void deliver(const State& s, Steps<State>& out) const {
    const auto* waiting = std::find(s.held, s.held + JOBS, WAITING);
    const bool lane_free = std::find(s.held, s.held + JOBS, SENT) == s.held + JOBS;
    const int j = waiting - s.held;
    if (j < JOBS && lane_free) {
      if (s.record[j] == TERMINAL)
        out.step(PROMPT, "mark: job %d is terminal", j, [&](State& n) { n.held[j] = NONE; });
      else if (s.record[j] == BEGUN && s.begun_on[j] != s.live)
        out.step(PROMPT, o.park ? "mark: job %d waits for machine %d: parked" : "mark: job %d waits for machine %d", j,
                 s.begun_on[j], [&](State& n) {
                   if (o.park) n.held[j] = PARKED;
                 });
      else
        out.step(PROMPT, "job %d begun and sent to machine %d", j, s.live, [&](State& n) {
          n.record[j] = BEGUN;
          n.begun_on[j] = s.live;
          n.held[j] = SENT;
          if (s.row[s.live - 1][j]) return;
          n.row[s.live - 1][j] = 1;
          n.executions[j]++;
        });
    }
    for (int k = 0; k < JOBS; k++) {
      if (s.held[k] == SENT)
        out.step(PROMPT, "job %d: outcome, settled", k, [&](State& n) {
          n.record[k] = TERMINAL;
          n.held[k] = NONE;
        });
      if (s.record[k] == BEGUN && s.held[k] == PARKED)
        out.step(SLOW, "job %d: deadline, unknown", k, [&](State& n) {
          n.record[k] = TERMINAL;
          n.held[k] = NONE;
        });
    }
  }

  static constexpr const char* HANDED_OUT_ONCE = "handed out once in a session";

  Claims<State> claims() const {
    return {
        {
            {"at most one execution",
             [](const State& s) {
               return std::all_of(s.executions, s.executions + JOBS, [](uint8_t count) { return count <= 1; });
             }},
            {HANDED_OUT_ONCE,
             [](const State& s) {
               return std::all_of(s.handed_out, s.handed_out + JOBS, [](uint8_t count) { return count <= 1; });
             }},
        },
        // Every job has ended, or waits for the machine that is not there.
        [](const State& s) {
          if (!s.live) return true;
          for (int k = 0; k < JOBS; k++)
            if (s.record[k] != TERMINAL && !(s.record[k] == BEGUN && s.begun_on[k] != s.live)) return false;
          return true;
        },
        true,
    };
  }
};

using O = Parking::Options;

const std::vector<Variant<Parking>> VARIANTS = {
    {"window-1", holds(2287), [](O&) {}},
    {"window-2", holds(3629),
     [](O& o) {
       o.window = 2;
       o.faults = 4;
     }},
    {"X-parked-takes-a-place", breaks("resolves promptly", 1319), [](O& o) { o.parked_takes_a_place = true; }},
    {"X-parked-not-in-flight", breaks(Parking::HANDED_OUT_ONCE, 327), [](O& o) { o.parked_is_in_flight = false; }},
    {"X-not-parked", breaks("resolves", 1059), [](O& o) { o.park = false; }},
};

int main(int argc, char** argv) { return run_variants(argc, argv, VARIANTS); }
