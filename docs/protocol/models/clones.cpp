// Copies of a journal (rules 4 and 6, close code 4503). One unhinted job, one machine, and a copy of its disk: started
// beside it (a clone) or put back in its place (a restore).
#include "checker.hpp"

enum Record : uint8_t { QUEUED = 1, BEGUN, TERMINAL };
enum Row : uint8_t { NO_ROW, RUNNING, COMPLETED, UNKNOWN };  // of the journal; the last two double as outcomes
enum Copy : uint8_t { NO_COPY, TAKEN, IN_USE };

struct Clones {
  struct State {
    uint8_t record, begun_by;  // journal id of the begin mark
    uint8_t executions, holder;
    uint8_t up[2], connected[2], stopped[2];
    uint8_t row[2], journal[2], connects[2];  // the journal's row of the job, its id, its count of connects
    uint8_t held[2], marked[2], frame[2], result[2], running[2];  // per process: the entry, the mark, then the machine
    uint8_t copy, copied_row, copied_connects, connects_max;
    uint8_t faults;
  };

  struct Options {
    bool restore = false;           // else the copy starts elsewhere
    bool bound_to_machine = false;  // a journal that is opened elsewhere takes a new id
    bool hello_counter = false;     // hello carries a count; a journal that lags behind it is given a new id
    bool ping_the_old_one = false;  // a journal that is connected already is given a new id
    int faults = 1;
  } o;

  State first() const {
    State s{};
    s.record = QUEUED;
    s.up[0] = 1;
    s.journal[0] = s.journal[1] = 1;
    s.faults = o.faults;
    return s;
  }

  void canonical(State&) const {}

  static void lose_socket(State& n, int p) { n.connected[p] = n.held[p] = n.marked[p] = n.frame[p] = n.result[p] = 0; }

  // What a journal says after a start from the copied disk: an action that was cut off may have run.
  static uint8_t after_start(uint8_t row) { return row == RUNNING ? uint8_t{UNKNOWN} : row; }

  void next(const State& s, Steps<State>& out) const {
    if (s.copy == NO_COPY)
      out.step(FAULT, "disk of process 0 is copied", [&](State& n) {
        n.copy = TAKEN;
        n.copied_row = s.row[0];
        n.copied_connects = s.connects[0];
      });
    if (s.copy == TAKEN && !o.restore)
      out.step(FAULT, "the copy starts as process 1 elsewhere", [&](State& n) {
        n.copy = IN_USE;
        n.up[1] = 1;
        n.row[1] = after_start(s.copied_row);
        n.connects[1] = s.copied_connects;
        n.journal[1] = o.bound_to_machine ? 2 : 1;
      });
    if (s.copy == TAKEN && o.restore && !s.up[0])
      out.step(FAULT, "process 0: disk restored from the copy", [&](State& n) {
        n.copy = IN_USE;
        n.row[0] = after_start(s.copied_row);
        n.connects[0] = s.copied_connects;
      });
    for (int p = 0; p < 2; p++) {
      live(s, p, out);
      deliver(s, p, out);
    }
  }

  void live(const State& s, int p, Steps<State>& out) const {
    const int other = 1 - p;
    if (s.up[p] && !s.stopped[p] && !s.connected[p])
      out.step(PROMPT, "process %d connects, takes over", p, [&](State& n) {
        n.connected[p] = 1;
        if (n.connects[p] < 9) n.connects[p]++;
        if (o.hello_counter && s.journal[p] == 1) {
          if (n.connects[p] <= s.connects_max)
            n.journal[p] = 3 + p;
          else
            n.connects_max = n.connects[p];
        }
        if (o.ping_the_old_one && s.connected[other] && s.journal[other] == n.journal[p]) n.journal[p] = 3 + p;
        n.holder = p + 1;
        n.held[p] = s.record != TERMINAL;
        n.marked[p] = 0;
      });
    if (s.connected[p] && s.holder != p + 1)
      out.step(PROMPT, "process %d is told 4503, stops", p, [&](State& n) {
        lose_socket(n, p);
        n.stopped[p] = 1;
      });
    if (s.connected[p] && s.faults)
      out.step(FAULT, "socket of process %d drops", p, [&](State& n) {
        lose_socket(n, p);
        n.faults--;
      });
    if (s.up[p] && !s.stopped[p] && s.faults)
      out.step(FAULT, "process %d KILLED", p, [&](State& n) {
        lose_socket(n, p);
        n.up[p] = n.running[p] = 0;
        n.row[p] = after_start(n.row[p]);
        n.faults--;
      });
    if (!s.up[p] && (p == 0 || (s.copy == IN_USE && !o.restore)))
      out.step(PROMPT, "process %d starts again", p, [&](State& n) { n.up[p] = 1; });
  }

  void deliver(const State& s, int p, Steps<State>& out) const {
    if (s.held[p] && !s.marked[p])
      out.step(PROMPT, "begin mark for process %d", p, [&](State& n) {
        n.held[p] = 0;
        if (s.record == QUEUED || (s.record == BEGUN && s.begun_by == s.journal[p])) {
          n.record = BEGUN;
          n.begun_by = s.journal[p];
          n.marked[p] = 1;
        } else if (s.record == BEGUN) {
          n.record = TERMINAL;  // unknown: begun under another journal
        }
      });
    if (s.marked[p] && s.connected[p])
      out.step(PROMPT, "frame to process %d", p, [&](State& n) {
        n.marked[p] = 0;
        n.frame[p] = 1;
      });
    if (s.frame[p])
      out.step(PROMPT, s.row[p] == NO_ROW ? "process %d EXECUTES" : "process %d joins, or answers from its journal", p,
               [&](State& n) {
                 n.frame[p] = 0;
                 if (s.row[p] == NO_ROW) {
                   n.row[p] = RUNNING;
                   n.running[p] = 1;
                   n.executions++;
                 } else if (s.row[p] != RUNNING) {
                   n.result[p] = s.row[p];
                 }
               });
    if (s.running[p])
      out.step(PROMPT, "process %d: tool done", p, [&](State& n) {
        n.running[p] = 0;
        n.row[p] = COMPLETED;
        if (s.connected[p]) n.result[p] = COMPLETED;
      });
    if (s.result[p])
      out.step(PROMPT, "outcome of process %d durable", p, [&](State& n) {
        n.result[p] = 0;
        n.record = TERMINAL;
      });
  }

  static constexpr const char* ONCE = "at most one execution";

  Claims<State> claims() const {
    return {{{ONCE, [](const State& s) { return s.executions <= 1; }}}, nullptr, false};
  }
};

using O = Clones::Options;
constexpr auto ONCE = Clones::ONCE;

const std::vector<Variant<Clones>> VARIANTS = {
    {"clone-bound-to-machine", holds(25072),
     [](O& o) {
       o.bound_to_machine = true;
       o.faults = 3;
     }},
    {"clone-old-one-pinged", holds(181),
     [](O& o) {
       o.ping_the_old_one = true;
       o.faults = 0;
     }},
    {"X-clone-old-one-pinged-1-fault", breaks(ONCE, 2035), [](O& o) { o.ping_the_old_one = true; }},
    {"X-clone", breaks(ONCE, 1239), [](O&) {}},
    {"X-clone-hello-counter", breaks(ONCE, 199),
     [](O& o) {
       o.hello_counter = true;
       o.faults = 0;
     }},
    // Stays open, and is documented: an image of the same disk, put back.
    {"X-restore", breaks(ONCE, 306), [](O& o) { o.restore = true; }},
    {"X-restore-hello-counter", breaks(ONCE, 310),
     [](O& o) {
       o.restore = true;
       o.hello_counter = true;
     }},
};

int main(int argc, char** argv) { return run_variants(argc, argv, VARIANTS); }
