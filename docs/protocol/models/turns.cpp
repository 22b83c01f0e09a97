// The turn path (rules 30 to 34). One turn, up to three claims of its task (a lease may expire under a
// worker that is slow), one model call whose answer differs from call to call (1 or 2), a checkpoint, one tool call
// with the key `turn:1`, the final transaction, and the announcement. The task queue's own rules, as its SQL has them:
// an expired run is set `failed` by the next claim; a checkpoint of a higher attempt overwrites and does not lock the
// run row; extending a claim and completing a run lock it and refuse a run that is not running.
#include "checker.hpp"

enum Run : uint8_t { NO_RUN, RUNNING, FENCED, COMPLETED };
enum Task : uint8_t { PENDING, CLAIMED, DONE, FAILED };
enum At : uint8_t { NOWHERE, MODEL, ANSWERED, CHECKPOINTED, TOOL_ANSWERED, COMMITTED, PUBLISHED, GONE = 9 };

constexpr int ATTEMPTS_MAX = 3;
constexpr uint8_t GATEWAY_FENCE = 9;

struct Turns {
  struct Attempt {
    uint8_t run, at, answer, checked;
  };
  struct State {
    Attempt attempt[ATTEMPTS_MAX + 1];
    uint8_t attempts, expired;
    uint8_t checkpoint, checkpoint_by;
    uint8_t tool_arguments;  // of the job with the key `turn:1`: the answer that asked for it
    uint8_t terminal, terminal_answer, published, task;
    uint8_t log_fence;  // whoever last opened the thread's log
    uint8_t gateway_appends, fenced_out;
    uint8_t kills, expiries;
  };

  struct Options {
    bool checkpoint_locks_run = true;     // rule 30
    bool complete_after_publish = true;   // rule 31
    bool net_for_failed_tasks = true;     // rule 32
    bool gateways_fence_the_log = false;  // against rule 33
    int expiries = 2;
  } o;

  State first() const {
    State s{};
    s.kills = 1;
    s.expiries = o.expiries;
    s.gateway_appends = 1;
    return s;
  }

  void canonical(State&) const {}

  void next(const State& s, Steps<State>& out) const {
    const int current = s.attempts;
    if ((s.task == PENDING || (s.task == CLAIMED && s.expired)) && s.attempts < ATTEMPTS_MAX)
      out.step(PROMPT, "attempt %d claims the task (an older run is set failed), loads the checkpoint", s.attempts + 1,
               [&](State& n) {
                 n.task = CLAIMED;
                 n.expired = 0;
                 if (current && n.attempt[current].run == RUNNING) n.attempt[current].run = FENCED;
                 Attempt& a = n.attempt[++n.attempts];
                 a.run = RUNNING;
                 a.answer = s.checkpoint;
                 a.at = s.terminal ? COMMITTED : s.checkpoint ? CHECKPOINTED : MODEL;
                 n.log_fence = n.attempts;
               });
    if (s.task == CLAIMED && s.expired && s.attempts == ATTEMPTS_MAX && s.attempt[current].run == RUNNING)
      out.step(PROMPT, "no attempts left: the expired run and the task are set failed", [&](State& n) {
        n.attempt[current].run = FENCED;
        n.task = FAILED;
      });
    if (s.task == FAILED && !s.published && o.net_for_failed_tasks)
      out.step(PROMPT, "net: writes `failed` unless there is a terminal, and publishes", [&](State& n) {
        if (!s.terminal) {
          n.terminal = 1;
          n.terminal_answer = 0;
        }
        n.published = 1;
      });
    if (s.gateway_appends)
      out.step(PROMPT, "gateway appends `entry posted` to the same log", [&](State& n) {
        n.gateway_appends = 0;
        if (o.gateways_fence_the_log) n.log_fence = GATEWAY_FENCE;
      });
    for (int a = 1; a <= s.attempts; a++)
      if (s.attempt[a].at != GONE && s.attempt[a].at != NOWHERE) go_on(s, a, out);
    if (s.task == CLAIMED && current && s.attempt[current].at == GONE && !s.expired)
      out.step(SLOW, "the dead worker's lease expires", [](State& n) { n.expired = 1; });
  }

  void go_on(const State& s, int a, Steps<State>& out) const {
    const Attempt& w = s.attempt[a];
    const bool current = a == s.attempts;
    if (s.kills && current)
      out.step(FAULT, "worker of attempt %d KILLED", a, [&](State& n) {
        n.kills--;
        n.attempt[a].at = GONE;
      });
    if (w.run == NO_RUN) return;
    if (current && !s.expired && s.task == CLAIMED && s.expiries)
      out.step(FAULT, "attempt %d stalls: its lease expires (it goes on)", a, [](State& n) {
        n.expired = 1;
        n.expiries--;
      });
    if (w.at >= MODEL && w.at <= CHECKPOINTED && w.run == RUNNING && s.log_fence > a && current)
      out.step(PROMPT, "attempt %d: its delta is REFUSED although it holds the claim", a,
               [](State& n) { n.fenced_out = 1; });
    switch (w.at) {
      case MODEL:
        for (int answer = 1; answer <= 2; answer++)
          out.step(PROMPT, "attempt %d: the model answers %d", a, answer, [&](State& n) {
            n.attempt[a].at = ANSWERED;
            n.attempt[a].answer = answer;
          });
        break;
      case ANSWERED:
        checkpoint(s, a, out);
        break;
      case CHECKPOINTED:
        out.step(PROMPT, "attempt %d: tool call `turn:1` with the arguments of answer %d", a, w.answer, [&](State& n) {
          if (!s.tool_arguments) n.tool_arguments = w.answer;
          n.attempt[a].at = TOOL_ANSWERED;
        });
        break;
      case TOOL_ANSWERED:
        out.step(PROMPT, "attempt %d: final transaction (entry, terminal, usage)", a, [&](State& n) {
          if (s.terminal || w.run == FENCED) {
            n.attempt[a].at = s.terminal && w.run == RUNNING ? COMMITTED : GONE;
            return;
          }
          n.terminal = 1;
          n.terminal_answer = w.answer;
          n.attempt[a].at = COMMITTED;
          if (!o.complete_after_publish) {
            n.attempt[a].run = COMPLETED;
            n.task = DONE;
          }
        });
        break;
      case COMMITTED:
        if (s.terminal)
          out.step(PROMPT, "attempt %d: publishes the terminal", a, [&](State& n) {
            n.published = 1;
            n.attempt[a].at = PUBLISHED;
          });
        break;
      case PUBLISHED:
        out.step(PROMPT, "attempt %d: completes the task", a, [&](State& n) {
          if (w.run == RUNNING) {
            n.attempt[a].run = COMPLETED;
            n.task = DONE;
          }
          n.attempt[a].at = GONE;
        });
        break;
    }
  }

  void checkpoint(const State& s, int a, Steps<State>& out) const {
    const Attempt& w = s.attempt[a];
    if (o.checkpoint_locks_run)
      out.step(PROMPT, "attempt %d: checkpoint (run row locked)", a, [&](State& n) {
        if (w.run == FENCED) {
          n.attempt[a].at = GONE;
          return;
        }
        n.checkpoint = w.answer;
        n.checkpoint_by = a;
        n.attempt[a].at = CHECKPOINTED;
      });
    else if (!w.checked)
      out.step(PROMPT, "attempt %d: checkpoint call reads the run's state", a, [&](State& n) {
        if (w.run == FENCED)
          n.attempt[a].at = GONE;
        else
          n.attempt[a].checked = 1;
      });
    else
      out.step(PROMPT, "attempt %d: checkpoint call writes", a, [&](State& n) {
        if (a >= s.checkpoint_by) {
          n.checkpoint = w.answer;
          n.checkpoint_by = a;
        }
        n.attempt[a].at = CHECKPOINTED;
        n.attempt[a].checked = 0;
      });
  }

  static constexpr const char* OWN_TOOL_CALL = "the reply's tool outcome belongs to the reply's own tool call";
  static constexpr const char* NOT_FENCED_OUT = "the holder of the claim is never fenced out of the thread's log";

  Claims<State> claims() const {
    return {
        {
            {OWN_TOOL_CALL,
             [](const State& s) { return !s.terminal || !s.terminal_answer || s.tool_arguments == s.terminal_answer; }},
            {NOT_FENCED_OUT, [](const State& s) { return !s.fenced_out; }},
        },
        [](const State& s) { return s.terminal && s.published; },
        false,
    };
  }
};

using O = Turns::Options;

const std::vector<Variant<Turns>> VARIANTS = {
    {"3-faults", holds(11864), [](O&) {}},
    {"4-faults", holds(21620), [](O& o) { o.expiries = 3; }},
    {"X-checkpoint-not-locked", breaks(Turns::OWN_TOOL_CALL, 14665), [](O& o) { o.checkpoint_locks_run = false; }},
    {"X-complete-in-final-transaction", breaks("resolves", 8916), [](O& o) { o.complete_after_publish = false; }},
    {"X-no-net", breaks("resolves", 10626), [](O& o) { o.net_for_failed_tasks = false; }},
    {"X-gateway-fences-the-log", breaks(Turns::NOT_FENCED_OUT, 33), [](O& o) { o.gateways_fence_the_log = true; }},
};

int main(int argc, char** argv) { return run_variants(argc, argv, VARIANTS); }
