// The window and the claim (rules 3, 3a, 5a, 12, 13 and 18). Three jobs of one user in one stream, unhinted (U) or
// hinted (H); one machine with one serial lane; sessions one after the other, up to three alive at once, zombies
// included. A call to Redis and its answer are two steps; the answer may be lost.
//
// The calls of a session come in two designs:
//   apart   assert, claim and take are scripts of their own
//   serve   what we run: `serve.lua` asserts, claims and takes in one script, at the start, at each heartbeat, and
//           after every call of unknown outcome; `take.lua` only takes, and only under its own stored epoch
// A window of 1 to 3 stands for 16 places; a poison limit of 2 or 3 for 5 marks.
#pragma once

#include "checker.hpp"

enum Outcome : uint8_t { NO_OUTCOME, COMPLETED, UNKNOWN, EXPIRED, UNDELIVERABLE, FAILED };
enum Record : uint8_t { QUEUED = 1, BEGUN, TERMINAL };
enum Entry : uint8_t { NO_ENTRY, UNREAD, PENDING, ADRIFT };  // ADRIFT: its consumer was deleted with it
enum Row : uint8_t { NO_ROW, RUNNING, ROW_COMPLETED, ROW_UNKNOWN };
enum Lane : uint8_t { OUTSIDE, WAITING, STARTED };
enum Phase : uint8_t { LIVE = 1, HALF_OPEN, CLOSED };
enum Held : uint8_t { NOT_HELD, HELD, MARKED, SENT, ENDING };  // ENDING: the outcome is durable, settle is owed

constexpr int JOBS = 3;
constexpr int SESSIONS_MAX = 3;
constexpr int NOBODY = -1;
constexpr uint8_t FORGOTTEN = 7;  // owner of entries whose session is no longer modelled

// What must not have happened, ever.
enum Flag : uint8_t {
  TWICE_AT_ONCE = 1,
  OUT_OF_ORDER = 2,
  AFTER_OUTCOME = 4,
  PAST_DEADLINE = 8,
  BEFORE_WELCOME = 16,
  MARKED_AND_STUCK = 32,
  INNOCENT_ENDED = 64,
};

struct WindowState {
  // Sets of jobs, and of sessions, are bit sets.
  struct Session {
    uint8_t phase, frozen;
    uint8_t owes_claim;   // (or a serve)
    uint8_t left_behind;  // the last claim did not return all bodies
    uint8_t held[JOBS];
    uint8_t claimed;           // held jobs that came by a claim
    uint8_t taking, claiming;  // answers under way
    uint8_t given_up;          // places of a take that was given up before it ran, and that may run later
    uint8_t frames;            // on their way to the machine
    uint8_t lost_entry;        // held jobs whose entry was lost in a flush
    uint8_t result[JOBS];      // on its way to the worker
  };
  struct Job {
    uint8_t record, outcome, marks;
    uint8_t entry, owner, place;  // in the stream; `place` orders the entries
    uint8_t row, lane;
    uint8_t joined;            // sessions that are told its outcome
    uint8_t executions, late;  // up to 2; past its deadline
    uint8_t twice_in_lane;
    uint8_t row_hinted;  // the journal's row has it as hinted
    uint8_t ran_under_other_hint;
  };
  struct State {
    // The stored epoch: 2 * i is that of session i, 2 * i - 1 that of a forgotten one older than i.
    uint8_t stored;
    uint8_t sessions;
    uint8_t machine_up, asleep, slept;  // slept: it has not noticed yet
    uint8_t hint_changed;               // of job 0's tool, on the machine
    uint8_t flags;
    uint8_t faults, drops, kills, worker_kills, freezes, flushes, lost_answers, ends, sleeps, hint_changes;  // left
    Job job[JOBS];
    Session session[SESSIONS_MAX + 1];
  };

  struct Options {
    int hinted = 2;  // bit set: 2 is U H U
    int window = 2;
    const char* order = "012";  // of acceptance
    bool accepted_before = false;
    int limit = 0;                 // of begin marks; 0: not modelled
    int poison = NOBODY;           // job whose start kills the sidecar
    int hang = NOBODY;             // job whose tool ends by its timeout only
    bool hang_keeps_lane = false;  // a plain function: it goes on after its timeout
    int faults = 2, drops = 2, kills = 1, worker_kills = 1, freezes = 1, flushes = 1, lost_answers = 1, ends = 1;
    int sleeps = 0, hint_changes = 0;
    bool serve = false;
    // rule 13
    bool one_call_at_a_time = true;
    bool own_entries_claimed = true;
    bool in_flight_dropped = true;
    bool in_flight_by_job = true;  // else by entry
    bool in_flight_until_settled = true;
    bool rest_claimed_first = true;  // what a claim left behind comes before a take
    bool claim_after_lost_answer = true;
    bool delete_full_consumers = false;
    bool take_raises_epoch = false;  // against rule 12
    bool serve_takes_first = false;
    bool calls_run_late = false;      // serve only: a call that was given up may run after the serve that followed it
    bool late_calls_refused = false;  // calls are numbered, and one older than the newest serve is refused
    bool order_asked = true;          // without it order and promptness are not asked for
    bool sweeper_settles = true;      // what has ended and is still in the stream
    // rules 3 and 3a
    bool windowed = true;
    bool marked_alone = true;
    bool hello_lists_running = true;
    bool lane_busy = false;
    bool hint_in_frame = false;
    bool row_keeps_hint = true;
    // rule 5a
    bool lane_drops_waiting = true;
    bool lane_joins_waiting = true;
    bool deadline_at_start = true;
    bool sleep_noticed_at_start = true;
  } o;

  State first() const {
    State s{};
    s.machine_up = 1;
    for (int q = 0; q < JOBS; q++) s.job[o.order[q] - '0'].place = q;
    if (o.accepted_before)
      for (Job& job : s.job) {
        job.record = QUEUED;
        job.entry = UNREAD;
      }
    s.faults = o.faults;
    s.drops = o.drops;
    s.kills = o.kills;
    s.worker_kills = o.worker_kills;
    s.freezes = o.freezes;
    s.flushes = o.flushes;
    s.lost_answers = o.lost_answers;
    s.ends = o.ends;
    s.sleeps = o.sleeps;
    s.hint_changes = o.hint_changes;
    return s;
  }

  // Sessions that are over and hold nothing are taken out; what nobody can look at any more is zeroed.
  void canonical(State& n) const {
    for (int i = n.sessions; i >= 1; i--) {
      const Session& c = n.session[i];
      if (c.phase != CLOSED || std::any_of(c.held, c.held + JOBS, [](uint8_t held) { return held; })) continue;
      for (Job& job : n.job) {
        if (job.owner == i)
          job.owner = FORGOTTEN;
        else if (job.owner > i && job.owner < FORGOTTEN)
          job.owner--;
        job.joined = (job.joined & ((1 << i) - 1)) | (job.joined >> (i + 1)) << i;
      }
      for (int k = i; k < n.sessions; k++) n.session[k] = n.session[k + 1];
      n.session[n.sessions] = {};
      n.sessions--;
      if (n.stored > 2 * i)
        n.stored -= 2;
      else if (n.stored == 2 * i)
        n.stored--;
      if (n.stored == 1) n.stored = 0;
    }
    for (int j = 0; j < JOBS; j++) {
      Job& job = n.job[j];
      if (job.entry != PENDING) job.owner = 0;
      if (!o.limit) job.marks = 0;
      if (job.record != TERMINAL || job.entry) continue;
      bool in_use = job.lane || job.joined;
      for (int i = 1; i <= n.sessions; i++) {
        const Session& c = n.session[i];
        in_use |= c.held[j] || ((c.frames | c.taking | c.claiming) >> j & 1) || c.result[j];
      }
      if (!in_use) job.row = job.marks = job.twice_in_lane = job.row_hinted = 0;
    }
    if (!n.faults)
      n.drops = n.kills = n.worker_kills = n.freezes = n.flushes = n.lost_answers = n.ends = n.sleeps = n.hint_changes =
          0;
  }

  static bool may(const State& s, uint8_t State::* budget) { return s.*budget && s.faults; }
  static void use(State& n, uint8_t State::* budget) {
    n.*budget -= 1;
    n.faults--;
  }

  // ---- helpers

  bool hinted(int j) const { return o.hinted >> j & 1; }  // as at acceptance
  bool hinted_on_machine(const State& s, int j) const { return hinted(j) != (s.hint_changed && j == 0); }
  bool runs_again(const State& s, int j) const {
    return o.row_keeps_hint ? s.job[j].row_hinted : hinted_on_machine(s, j);
  }
  bool goes_alone(const Session& c, int j) const { return !hinted(j) || (o.marked_alone && (c.claimed >> j & 1)); }

  int free_places(const Session& c) const {
    int used = __builtin_popcount(c.taking) + __builtin_popcount(c.claiming);
    for (int j = 0; j < JOBS; j++) {
      const uint8_t held = c.held[j];
      if ((held == MARKED || held == SENT) && goes_alone(c, j) && o.windowed) return 0;
      used += held == HELD || held == MARKED || held == SENT;
    }
    return std::max(o.window - used, 0);
  }

  template <class Do>
  static void in_stream_order(const State& s, Do visit) {
    for (int place = 0; place < JOBS; place++)
      for (int j = 0; j < JOBS; j++)
        if (s.job[j].place == place) visit(j);
  }

  static void end_record(State& n, int j, Outcome outcome) {
    if (n.job[j].record == TERMINAL) return;  // rule 1
    n.job[j].record = TERMINAL;
    n.job[j].outcome = outcome;
  }
  static void end_late(State& n, int j) { end_record(n, j, n.job[j].record == QUEUED ? EXPIRED : UNKNOWN); }
  static void settle(State& n, int j) { n.job[j].entry = n.job[j].owner = 0; }
  static void enqueue(State& n, int j) {
    for (Job& job : n.job)
      if (job.place > n.job[j].place) job.place--;
    n.job[j].place = JOBS - 1;
    n.job[j].entry = UNREAD;
    n.job[j].owner = 0;
  }
  static void answer_joined(State& n, const State& s, int j, Outcome outcome) {
    for (int i = 1; i <= s.sessions; i++)
      if (s.job[j].joined >> i & 1) n.session[i].result[j] = outcome;
  }

  void lose_socket(State& n, int i) const {
    Session& c = n.session[i];
    c.frames = 0;
    for (int j = 0; j < JOBS; j++) {
      Job& job = n.job[j];
      c.result[j] = 0;
      job.joined &= ~(1 << i);
      if (o.lane_drops_waiting && job.lane == WAITING && !job.joined) job.lane = OUTSIDE;
    }
  }
  void half_open(State& n, int i) const {
    lose_socket(n, i);
    if (n.session[i].phase == LIVE) n.session[i].phase = HALF_OPEN;
  }
  void half_open_all(State& n) const {
    for (int i = 1; i <= n.sessions; i++) half_open(n, i);
  }
  // The worker lets the session go; what has a durable outcome it still settles, unless it died.
  void close(State& n, int i, bool worker_lives) const {
    lose_socket(n, i);
    Session& c = n.session[i];
    c.phase = CLOSED;
    c.given_up = 0;
    c.owes_claim = c.left_behind = c.taking = c.claiming = c.claimed = c.frozen = 0;
    for (uint8_t& held : c.held)
      if (!worker_lives || held != ENDING) held = NOT_HELD;
  }
  // What the journal says after a restart: hinted rows are gone, others were cut off.
  void clear_lane(State& n, const State& s) const {
    n.machine_up = 0;
    for (int k = 0; k < JOBS; k++) {
      n.job[k].lane = OUTSIDE;
      n.job[k].twice_in_lane = 0;
      if (n.job[k].row == RUNNING) n.job[k].row = runs_again(s, k) ? NO_ROW : ROW_UNKNOWN;
    }
    half_open_all(n);
  }

  // ---- claims

  static constexpr const char* ONCE = "at most one execution of an unhinted job";
  static constexpr const char* DID_NOT_RUN = "expired, cancelled, undeliverable, failed: no unhinted run";
  static constexpr const char* NOT_UNDER_OTHER_HINT = "expired, cancelled, failed: no run under another hint";
  static constexpr const char* NOT_TWICE_AT_ONCE = "nothing is handed out twice at once in one session";
  static constexpr const char* NOT_AFTER_OUTCOME = "nothing with a durable outcome is handed out again";
  static constexpr const char* IN_ORDER = "frames leave in stream order";
  static constexpr const char* NOT_LATE = "nothing starts past its deadline";
  static constexpr const char* WELCOME_FIRST = "nothing starts between a wake and the next welcome";
  static constexpr const char* NOT_STUCK = "a marked job never waits behind another in the lane";
  static constexpr const char* INNOCENT = "an innocent job is not ended as poison";

  Claims<State> claims() const {
    auto never = [](Flag flag) { return [flag](const State& s) { return !(s.flags & flag); }; };
    auto every = [](auto is) {
      return [is](const State& s) {
        for (int j = 0; j < JOBS; j++)
          if (!is(s.job[j], j)) return false;
        return true;
      };
    };
    auto did_not_run = [](const Job& job) { return job.record == TERMINAL && job.outcome >= EXPIRED; };
    return {
        {
            {ONCE, every([this](const Job& job, int j) { return hinted(j) || job.executions <= 1; })},
            {DID_NOT_RUN, every([this, did_not_run](const Job& job, int j) {
               return hinted(j) || !did_not_run(job) || !job.executions;
             })},
            {NOT_UNDER_OTHER_HINT,
             every([did_not_run](const Job& job, int) { return !job.ran_under_other_hint || !did_not_run(job); })},
            {NOT_TWICE_AT_ONCE, never(TWICE_AT_ONCE)},
            {NOT_AFTER_OUTCOME, never(AFTER_OUTCOME)},
            {IN_ORDER, [this](const State& s) { return !o.order_asked || !(s.flags & OUT_OF_ORDER); }},
            {NOT_LATE, never(PAST_DEADLINE)},
            {WELCOME_FIRST, never(BEFORE_WELCOME)},
            {NOT_STUCK, never(MARKED_AND_STUCK)},
            {INNOCENT, never(INNOCENT_ENDED)},
        },
        every([](const Job& job, int) { return job.record == TERMINAL && !job.entry; }),
        o.hang == NOBODY && o.order_asked,
    };
  }
};
