// Presence, grace, stand-by and clones (rules 12a, 14, 14a; close codes 4003 and 4503). Up to three processes, some of
// which may share a machine id (clones). Sessions are minted in order and asserted later or never; holders may be half
// open, frozen, or draining (the new socket comes before the old one goes); Redis may be flushed.
#include "checker.hpp"

enum Phase : uint8_t { MINTED = 1, ASSERTED, CLOSED };
enum Live : uint8_t { ABSENT, ONLINE, RECONNECTING };
enum Process : uint8_t { RUNS, STOPPED, DEAD };   // STOPPED: for good, after a 4503
enum Code : uint8_t { OTHER_MACHINE, REPLACED };  // 4003, 4503

constexpr int PROCESSES_MAX = 3;
constexpr int SESSIONS_MAX = 5;
constexpr uint8_t COUNT_MAX = 15;

struct Presence {
  struct Session {
    uint8_t phase;
    uint8_t open;   // the client's end
    uint8_t alive;  // a sign of life in the last 20 s
    uint8_t frozen, process, draining;
  };
  struct State {
    // The stored epoch: 2 * i is that of session i, 2 * i - 1 that of a forgotten session older than i.
    uint8_t stored;
    uint8_t sessions;
    uint8_t presence, machine;    // what `bridge:presence` says
    uint8_t evictions, switches;  // of clones; of machines under a live holder
    uint8_t holder_refused;
    uint8_t faults, drops, kills, freezes, flushes, worker_kills, drains, goodbyes;  // left
    uint8_t process[PROCESSES_MAX];
    uint8_t last_dialled[PROCESSES_MAX];
    Session session[SESSIONS_MAX + 1];
  };

  struct Options {
    int processes = 1;
    int machine_of[PROCESSES_MAX] = {1, 1, 1};
    int faults = 3;
    bool dead_stay = false;
    bool ask_at_first_assert = true;         // 14a
    bool ask_at_each_refresh = false;        // 14a taken too far
    bool grace_counts = true;                // 14a: `reconnecting` counts as live
    bool always_4503 = false;                // whoever is outranked, whatever presence says
    bool stop_without_other_socket = false;  // else: 4503 counts on the socket dialled last
    bool supervisor_restarts = false;
    bool needs_sign_of_life = true;  // 12a
  } o;

  State first() const {
    State s{};
    s.faults = o.faults;
    s.drops = 2;
    s.kills = s.freezes = s.flushes = s.worker_kills = s.drains = s.goodbyes = 1;
    return s;
  }

  // Sessions that both ends have forgotten are taken out, and those after them move up.
  void canonical(State& n) const {
    for (int i = n.sessions; i >= 1; i--) {
      if (n.session[i].phase != CLOSED || n.session[i].open) continue;
      for (int k = i; k < n.sessions; k++) n.session[k] = n.session[k + 1];
      n.session[n.sessions] = {};
      n.sessions--;
      for (uint8_t& last : n.last_dialled) {
        if (last == i)
          last = 0;
        else if (last > i)
          last--;
      }
      if (n.stored > 2 * i)
        n.stored -= 2;
      else if (n.stored == 2 * i)
        n.stored--;
      if (n.stored == 1) n.stored = 0;  // nobody is left whom it could fence
    }
    if (n.presence == ABSENT) n.machine = 0;
    if (!n.faults) n.drops = n.kills = n.freezes = n.flushes = n.worker_kills = n.drains = n.goodbyes = 0;
  }

  static void use(State& n, uint8_t State::* budget) {
    n.*budget -= 1;
    n.faults--;
  }

  static void count(uint8_t& counter) {
    if (counter < COUNT_MAX) counter++;
  }

  int machine_of(const Session& session) const { return o.machine_of[session.process]; }

  // Closed by the worker. A 4503 stops the process for good if it comes on the socket dialled last.
  void close(State& n, int i, Code code) const {
    Session& session = n.session[i];
    const bool told = session.open && code == REPLACED;
    const int p = session.process;
    session.phase = CLOSED;
    session.open = session.frozen = session.alive = 0;
    if (!told) return;
    bool stops = n.last_dialled[p] == i;
    if (o.stop_without_other_socket) {
      stops = true;
      for (int k = 1; k <= n.sessions; k++) stops &= !(n.session[k].process == p && n.session[k].open);
    }
    if (!stops) return;
    n.process[p] = STOPPED;
    for (int k = 1; k <= n.sessions; k++)
      if (n.session[k].process == p) n.session[k].open = 0;
  }

  void next(const State& s, Steps<State>& out) const {
    for (int p = 0; p < o.processes; p++) run_process(s, p, out);
    bool refreshed = false;
    for (int i = 1; i <= s.sessions; i++) {
      const Session& c = s.session[i];
      refreshed |= c.phase == ASSERTED && !c.frozen && (c.alive || !o.needs_sign_of_life) && s.stored <= 2 * i;
      break_session(s, i, out);
      if (c.frozen || c.phase == CLOSED) continue;
      if (c.phase == ASSERTED && c.open && !c.alive)
        out.step(PROMPT, "session %d: a pong", i, [&](State& n) { n.session[i].alive = 1; });
      if (!c.open && c.alive)
        out.step(SLOW, "session %d: no sign of life any more", i, [&](State& n) { n.session[i].alive = 0; });
      if (c.phase == MINTED)
        assert_first(s, i, out);
      else
        hold(s, i, out);
    }
    if (s.presence != ABSENT && !refreshed)
      out.step(SLOW, s.presence == ONLINE ? "presence lapses" : "grace lapses", [](State& n) { n.presence = ABSENT; });
    if (s.flushes && s.faults)
      out.step(FAULT, "Redis FLUSHED", [](State& n) {
        use(n, &State::flushes);
        n.stored = n.presence = 0;
      });
  }

  void run_process(const State& s, int p, Steps<State>& out) const {
    bool open = false, open_for_work = false;
    for (int i = 1; i <= s.sessions; i++) {
      const Session& c = s.session[i];
      if (c.process != p || !c.open) continue;
      open = true;
      open_for_work |= !c.draining;
    }
    if (s.process[p] == RUNS && !open_for_work && s.sessions < SESSIONS_MAX)
      out.step(PROMPT, "process %d dials: session %d minted", p, s.sessions + 1, [&](State& n) {
        Session& c = n.session[++n.sessions];
        c.phase = MINTED;
        c.open = c.alive = 1;
        c.process = p;
        n.last_dialled[p] = n.sessions;
      });
    if (s.process[p] == RUNS && s.kills && s.faults)
      out.step(FAULT, "process %d KILLED", p, [&](State& n) {
        use(n, &State::kills);
        n.process[p] = DEAD;
        for (int i = 1; i <= s.sessions; i++)
          if (s.session[i].process == p) n.session[i].open = 0;
      });
    if (s.process[p] == RUNS && open && s.goodbyes && s.faults)
      out.step(FAULT, "process %d says goodbye and ends", p, [&](State& n) {
        use(n, &State::goodbyes);
        n.process[p] = DEAD;
        for (int i = 1; i <= s.sessions; i++) {
          if (s.session[i].process != p || !s.session[i].open) continue;
          n.session[i].open = 0;
          if (s.session[i].phase != ASSERTED || s.session[i].frozen) continue;
          if (s.stored <= 2 * i) {
            n.presence = ABSENT;
            n.stored = std::max<uint8_t>(n.stored, 2 * i);
          }
          n.session[i].phase = CLOSED;
        }
      });
    if (s.process[p] == DEAD && !o.dead_stay)
      out.step(PROMPT, "process %d starts again", p, [&](State& n) { n.process[p] = RUNS; });
    if (s.process[p] == STOPPED && o.supervisor_restarts)
      out.step(PROMPT, "supervisor starts process %d again", p, [&](State& n) { n.process[p] = RUNS; });
  }

  void break_session(const State& s, int i, Steps<State>& out) const {
    const Session& c = s.session[i];
    if (c.phase != CLOSED && c.open && s.drops && s.faults)
      out.step(FAULT, "socket of session %d drops", i, [&](State& n) {
        use(n, &State::drops);
        n.session[i].open = 0;
      });
    if (c.phase != CLOSED && c.open && c.frozen)
      out.step(PROMPT, "client gives session %d up (frozen worker)", i, [&](State& n) { n.session[i].open = 0; });
    if (c.phase != CLOSED && !c.frozen && s.freezes && s.faults)
      out.step(FAULT, "worker of session %d FREEZES", i, [&](State& n) {
        use(n, &State::freezes);
        n.session[i].frozen = 1;
      });
    if (c.frozen) out.step(PROMPT, "worker of session %d wakes", i, [&](State& n) { n.session[i].frozen = 0; });
    if (c.frozen && c.alive)
      out.step(SLOW, "session %d: no sign of life any more (frozen)", i, [&](State& n) { n.session[i].alive = 0; });
    if (c.phase != CLOSED && s.worker_kills && s.faults)
      out.step(FAULT, "worker of session %d KILLED", i, [&](State& n) {
        use(n, &State::worker_kills);
        n.session[i].phase = CLOSED;
        n.session[i].open = 0;
      });
    if (c.phase == ASSERTED && c.open && !c.frozen && !c.draining && s.drains && s.faults)
      out.step(FAULT, "session %d: draining", i, [&](State& n) {
        use(n, &State::drains);
        n.session[i].draining = 1;
      });
    if (c.phase == CLOSED && c.open)
      out.step(PROMPT, "client sees session %d closed", i, [&](State& n) { n.session[i].open = 0; });
  }

  bool names_another(const State& s, int machine) const {
    return s.presence != ABSENT && s.machine != machine && (o.grace_counts || s.presence == ONLINE);
  }

  Code outranked_code(const State& s, int machine) const {
    return (s.presence != ABSENT && s.machine == machine) || o.always_4503 ? REPLACED : OTHER_MACHINE;
  }

  void assert_first(const State& s, int i, Steps<State>& out) const {
    const Session& c = s.session[i];
    const int machine = machine_of(c);
    if (names_another(s, machine) && o.ask_at_first_assert) {
      out.step(PROMPT, "session %d: assert refused, 4003", i, [&](State& n) { close(n, i, OTHER_MACHINE); });
      return;
    }
    if (s.stored > 2 * i) {
      const Code code = outranked_code(s, machine);
      out.step(PROMPT, code == REPLACED ? "session %d: assert outranked, 4503" : "session %d: assert outranked, 4003",
               i, [&](State& n) { close(n, i, code); });
      return;
    }
    out.step(PROMPT, "session %d: assert accepted (machine %d)", i, machine, [&](State& n) {
      n.stored = 2 * i;
      if (s.presence != ABSENT && s.machine != machine) count(n.switches);
      auto older = [&](auto is) {
        for (int k = 1; k < i; k++)
          if (s.session[k].phase == ASSERTED && s.session[k].open && is(k, s.session[k])) return true;
        return false;
      };
      if (s.presence == ONLINE && s.machine == machine &&
          older([&](int, const Session& k) { return k.process != c.process && machine_of(k) == machine; }))
        count(n.evictions);
      if (older([&](int k, const Session& held) {
            return !held.frozen && machine_of(held) != machine && (!s.stored || s.stored == 2 * k);
          }))
        count(n.switches);
      n.presence = ONLINE;
      n.machine = machine;
      n.session[i].phase = ASSERTED;
    });
  }

  void hold(const State& s, int i, Steps<State>& out) const {
    const Session& c = s.session[i];
    const int machine = machine_of(c);
    auto write = [&](State& n, Live presence) {
      n.stored = 2 * i;
      n.presence = presence;
      n.machine = machine;
    };
    if (s.stored > 2 * i) {
      const Code code = outranked_code(s, machine);
      out.step(PROMPT, code == REPLACED ? "session %d: outranked, 4503" : "session %d: outranked, 4003", i,
               [&](State& n) { close(n, i, code); });
      return;
    }
    if (c.alive || !o.needs_sign_of_life) {
      if (names_another(s, machine) && o.ask_at_each_refresh)
        out.step(PROMPT, "session %d: refresh refused, 4003", i, [&](State& n) {
          close(n, i, OTHER_MACHINE);
          n.holder_refused = 1;
        });
      else
        out.step(PROMPT, "session %d refreshes", i, [&](State& n) { write(n, ONLINE); });
    }
    if (!c.open)
      out.step(PROMPT, "session %d: loss noticed, presence set reconnecting", i, [&](State& n) {
        write(n, RECONNECTING);
        n.session[i].phase = CLOSED;
      });
    if (c.draining && c.open)
      out.step(PROMPT, "session %d: drained, closed 1012, reconnecting", i, [&](State& n) {
        write(n, RECONNECTING);
        n.session[i].phase = CLOSED;
        n.session[i].open = 0;
      });
  }

  static constexpr const char* NOT_LOCKED_OUT = "the only process of a machine never stops for good";
  static constexpr const char* FEW_EVICTIONS = "evictions between clones <= 1 + 2 per fault";
  static constexpr const char* FEW_SWITCHES = "changes of machine under a live holder <= faults";
  static constexpr const char* HOLDER_STAYS = "a holder is never refused for another machine's presence";

  Claims<State> claims() const {
    const bool one_machine =
        std::all_of(o.machine_of, o.machine_of + o.processes, [&](int m) { return m == o.machine_of[0]; });
    auto some_process_left = [this](const State& s, int machine) {
      for (int p = 0; p < o.processes; p++)
        if (o.machine_of[p] == machine && s.process[p] != STOPPED) return true;
      return false;
    };
    return {
        {
            {NOT_LOCKED_OUT,
             [this, some_process_left](const State& s) {
               return std::all_of(o.machine_of, o.machine_of + o.processes,
                                  [&](int machine) { return some_process_left(s, machine); });
             }},
            {FEW_EVICTIONS, [this](const State& s) { return s.evictions <= 1 + 2 * (o.faults - s.faults); }},
            {FEW_SWITCHES, [this](const State& s) { return s.switches <= o.faults - s.faults; }},
            {HOLDER_STAYS, [](const State& s) { return !s.holder_refused; }},
        },
        [this](const State& s) { return is_served(s); },
        one_machine,
    };
  }

  // The holder of the epoch is connected and presence says so; or no process is left.
  bool is_served(const State& s) const {
    bool any = false;
    for (int p = 0; p < o.processes; p++) any |= s.process[p] != STOPPED && !(o.dead_stay && s.process[p] == DEAD);
    if (!any) return true;
    if (!s.stored || s.stored % 2) return false;
    const Session& c = s.session[s.stored / 2];
    return c.phase == ASSERTED && c.open && !c.frozen && !c.draining && s.presence == ONLINE &&
           s.machine == machine_of(c);
  }
};

using O = Presence::Options;

void two_machines(O& o) {
  o.processes = 2;
  o.machine_of[1] = 2;
}

const std::vector<Variant<Presence>> VARIANTS = {
    {"1-machine", holds(77841), [](O& o) { o.faults = 4; }},
    {"2-machines", holds(275949), two_machines},
    {"2-machines-dead-stay", holds(224200),
     [](O& o) {
       two_machines(o);
       o.dead_stay = true;
     }},
    {"2-clones", holds(758069), [](O& o) { o.processes = 2; }},
    {"2-clones-and-a-machine", holds(343826),
     [](O& o) {
       o.processes = 3;
       o.machine_of[2] = 2;
       o.faults = 2;
     }},
    // Rule 12a changes times only.
    {"no-sign-of-life-needed", holds(189660),
     [](O& o) {
       two_machines(o);
       o.needs_sign_of_life = false;
       o.dead_stay = true;
     }},
    {"X-4503-whenever-outranked", breaks(Presence::NOT_LOCKED_OUT, 3014),
     [](O& o) {
       two_machines(o);
       o.always_4503 = true;
     }},
    {"X-stop-without-other-socket", breaks(Presence::NOT_LOCKED_OUT, 2723),
     [](O& o) { o.stop_without_other_socket = true; }},
    {"X-ask-at-each-refresh", breaks(Presence::HOLDER_STAYS, 8356),
     [](O& o) {
       two_machines(o);
       o.ask_at_each_refresh = true;
     }},
    {"X-supervisor-restarts", breaks(Presence::FEW_EVICTIONS, 23),
     [](O& o) {
       o.processes = 2;
       o.supervisor_restarts = true;
       o.faults = 0;
     }},
    {"X-grace-does-not-count", breaks(Presence::FEW_SWITCHES, 275210),
     [](O& o) {
       two_machines(o);
       o.grace_counts = false;
     }},
    {"X-do-not-ask", breaks(Presence::FEW_SWITCHES, 195),
     [](O& o) {
       two_machines(o);
       o.ask_at_first_assert = false;
       o.faults = 1;
     }},
};

int main(int argc, char** argv) { return run_variants(argc, argv, VARIANTS); }
