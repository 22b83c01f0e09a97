// The wake-up (rules 3a and 13; the job's walk from the enqueue script to the take). Two workers, each with one control
// stream and one blocking read of it; three jobs of one user. A call to Redis is a step, its answer another.
//
// Checked: without lost notes no job waits for a heartbeat; with lost notes none sits through two heartbeats of a
// holder that had a free place.
//
// The calls of a session come in two designs:
//   apart    assert, claim and take are scripts of their own; the assert's answer brings a first take with it
//   serve    what we run: `serve.lua` asserts, claims and takes in one script, at the start, at each heartbeat, and
//            after every call of unknown outcome; `take.lua` only takes, and only under its own stored epoch
// What an older session held counts as untaken again from the moment that a claim of a newer one has run.
#pragma once

#include "checker.hpp"

enum Phase : uint8_t { LIVE = 1, HALF_OPEN, CLOSED };
enum Call : uint8_t { NO_CALL, TAKE, ANSWER, SERVE };  // ANSWER: it has run at Redis, its answer is under way

constexpr int JOBS = 3;
constexpr int SESSIONS_MAX = 3;

struct Wakeup {
  // Sets of jobs are bit sets.
  struct Session {
    uint8_t phase, worker, call;
    uint8_t asked;      // places that the call offered
    uint8_t owes_take;  // a debt: what came, or could not be looked for, while a call was under way or no place free
    uint8_t owes_serve;
    uint8_t known;  // the pump knows that it has asserted
    uint8_t held, answer;
    uint8_t adrift;  // pending under its name, but the answer that brought them was lost
  };
  struct State {
    uint8_t stored;  // epoch: 2 * i is that of session i, 2 * i - 1 that of a forgotten one older than i
    uint8_t sessions;
    uint8_t presence;  // the worker that it names; 0: none
    uint8_t accepted;  // how many jobs so far
    uint8_t taken, done;
    uint8_t notes;         // bit set of workers
    uint8_t deaf;          // workers whose cursor lies beyond their control stream's new ids
    uint8_t reborn;        // Redis began anew, and the newest session has not asserted since
    uint8_t waited[JOBS];  // heartbeats that a job sat through
    uint8_t faults, drops, lost_notes, lost_answers, flushes, kills;  // left
    Session session[SESSIONS_MAX + 1];
  };

  struct Options {
    int window = 1;
    int faults = 2, drops = 1, lost_notes = 0, lost_answers = 0, flushes = 1, kills = 1;
    bool serve = false;
    bool clock_back = false;  // after the flush new ids are smaller than those already read
    bool rewind_when_reborn = true;
    bool full_answer_repeats = true;        // a call that came back full is followed by a take
    bool note_in_call_counts = true;        // a note that comes while a call is under way is a debt
    bool debt_outlives_full_window = true;  // serve only: a call that offered no place clears no debt
    bool take_when_freed = true;
    bool take_when_freed_only_if_owed = false;
    bool take_after_assert = true, take_with_assert = true;
    bool take_at_heartbeat = true;
    bool serve_after_lost_answer = true;
  } o;

  State first() const {
    State s{};
    s.faults = o.faults;
    s.drops = o.drops;
    s.lost_notes = o.lost_notes;
    s.lost_answers = o.lost_answers;
    s.flushes = o.flushes;
    s.kills = o.kills;
    return s;
  }

  void canonical(State& n) const {
    for (int k = 0; k < JOBS; k++)
      if ((n.taken | n.done) >> k & 1) n.waited[k] = 0;
    for (int i = n.sessions; i >= 1; i--) {
      if (n.session[i].phase != CLOSED) continue;
      for (int k = i; k < n.sessions; k++) n.session[k] = n.session[k + 1];
      n.session[n.sessions] = {};
      n.sessions--;
      if (n.stored > 2 * i)
        n.stored -= 2;
      else if (n.stored == 2 * i)
        n.stored--;
      if (n.stored == 1) n.stored = 0;
    }
    if (!n.faults) n.drops = n.lost_notes = n.lost_answers = n.flushes = n.kills = 0;
  }

  static void use(State& n, uint8_t State::* budget) {
    n.*budget -= 1;
    n.faults--;
  }

  static int count(uint8_t set) { return __builtin_popcount(set); }
  int free_places(const Session& c) const { return o.window - count(c.held); }
  static uint8_t unread(const State& s) { return ((1 << s.accepted) - 1) & ~s.taken & ~s.done; }

  static void give_back(State& n, int i) {
    Session& c = n.session[i];
    n.taken &= ~(c.held | c.answer | c.adrift);
    c.held = c.answer = c.adrift = 0;
  }
  static void end(State& n, int i) {
    give_back(n, i);
    n.session[i].phase = CLOSED;
  }

  static void take(State& n, int i, int places) {
    const uint8_t from = unread(n);
    for (int k = 0; k < JOBS && places; k++) {
      if (!(from >> k & 1)) continue;
      places--;
      n.session[i].answer |= 1 << k;
      n.taken |= 1 << k;
    }
  }

  // serve: the pump sends what a session owes, if no call of it is under way.
  void send_owed(State& n, int i) const {
    Session& c = n.session[i];
    if (c.call != NO_CALL) return;
    const int free = free_places(c);
    if (c.owes_serve) {
      c.call = SERVE;
      c.owes_serve = 0;
    } else if (c.owes_take && c.known && free) {
      c.call = TAKE;
    } else {
      return;
    }
    c.asked = free;
    if (free || !o.debt_outlives_full_window) c.owes_take = 0;
  }
  void owe_take(State& n, int i) const {
    n.session[i].owes_take = 1;
    send_owed(n, i);
  }
  void owe_serve(State& n, int i) const {
    n.session[i].owes_serve = 1;
    send_owed(n, i);
  }
  // apart: a take now, or a debt.
  void take_or_owe(State& n, int i) const {
    Session& c = n.session[i];
    if (c.call == NO_CALL && free_places(c) > 0)
      c.call = TAKE;
    else
      c.owes_take = 1;
  }

  void next(const State& s, Steps<State>& out) const {
    accept(s, out);
    bool live = false;
    for (int i = 1; i <= s.sessions; i++) live |= s.session[i].phase == LIVE;
    if (!live && s.sessions < SESSIONS_MAX)
      for (int w = 1; w <= 2; w++) connect(s, w, out);
    for (int w = 1; w <= 2; w++)
      if ((s.notes >> w & 1) && !(s.deaf >> w & 1)) read_note(s, w, out);
    for (int i = 1; i <= s.sessions; i++)
      if (s.session[i].phase != CLOSED) {
        break_session(s, i, out);
        call(s, i, out);
        finish_job(s, i, out);
        heartbeat(s, i, out);
      }
    flush(s, out);
  }

  void accept(const State& s, Steps<State>& out) const {
    if (s.accepted == JOBS) return;
    out.step(PROMPT, "job %d enqueued, note to worker %d", s.accepted, s.presence, [&](State& n) {
      n.accepted++;
      if (s.presence) n.notes |= 1 << s.presence;
    });
    if (s.lost_notes && s.faults)
      out.step(FAULT, "job %d enqueued, note to worker %d LOST (trim, TTL)", s.accepted, s.presence, [](State& n) {
        use(n, &State::lost_notes);
        n.accepted++;
      });
  }

  void connect(const State& s, int w, Steps<State>& out) const {
    out.step(PROMPT, o.serve ? "session %d begins on worker %d" : "session %d asserts on worker %d", s.sessions + 1, w,
             [&](State& n) {
               const int i = ++n.sessions;
               Session& c = n.session[i];
               c.phase = LIVE;
               c.worker = w;
               if (o.serve) {
                 owe_serve(n, i);
                 return;
               }
               assert_epoch(n, i);
               memset(n.waited, 0, JOBS);
               if (!o.take_after_assert || !o.take_with_assert) return;
               c.call = ANSWER;
               c.asked = o.window;
               take(n, i, o.window);
             });
  }

  // With the claim that follows every assert: older sessions hold nothing any more.
  static void assert_epoch(State& n, int i) {
    n.stored = 2 * i;
    n.presence = n.session[i].worker;
    for (int k = 1; k < i; k++) give_back(n, k);
  }

  void read_note(const State& s, int w, Steps<State>& out) const {
    out.step(PROMPT, "pump of worker %d reads its note", w, [&](State& n) {
      n.notes &= ~(1 << w);
      for (int i = 1; i <= s.sessions; i++) {
        const Session& c = s.session[i];
        if (c.worker != w || c.phase == CLOSED) continue;
        if (c.call == NO_CALL && c.known)
          o.serve ? owe_take(n, i) : take_or_owe(n, i);
        else if (o.note_in_call_counts)
          n.session[i].owes_take = 1;
      }
    });
  }

  void break_session(const State& s, int i, Steps<State>& out) const {
    const Session& c = s.session[i];
    if (c.phase == LIVE && s.drops && s.faults)
      out.step(FAULT, "socket of session %d drops", i, [&](State& n) {
        use(n, &State::drops);
        n.session[i].phase = HALF_OPEN;
      });
    if (s.kills && s.faults)
      out.step(FAULT, "worker of session %d KILLED (its notes die)", i, [&](State& n) {
        use(n, &State::kills);
        for (int k = 1; k <= s.sessions; k++)
          if (s.session[k].worker == c.worker) end(n, k);
        n.notes &= ~(1 << c.worker);
        n.deaf &= ~(1 << c.worker);
      });
    if (c.phase == HALF_OPEN)
      out.step(PROMPT, "worker notices that session %d is gone", i, [&](State& n) { end(n, i); });
  }

  void call(const State& s, int i, Steps<State>& out) const {
    const Session& c = s.session[i];
    if (!o.serve && !c.known && !(o.take_with_assert && c.call == ANSWER))
      out.step(PROMPT, "session %d: assert answered, welcome", i, [&](State& n) {
        n.session[i].known = 1;
        if (o.take_after_assert && !o.take_with_assert && c.call == NO_CALL) n.session[i].call = TAKE;
      });
    if (c.call == TAKE || c.call == SERVE) {
      if (s.stored > 2 * i)
        out.step(PROMPT, "session %d: call refused, outranked, stops", i, [&](State& n) { end(n, i); });
      else if (c.call == SERVE)
        out.step(PROMPT, "session %d: serve has run", i, [&](State& n) {
          if (s.stored < 2 * i) memset(n.waited, 0, JOBS);
          assert_epoch(n, i);
          n.taken &= ~c.adrift;  // its claim brings own entries too
          n.session[i].adrift = 0;
          take(n, i, c.asked);
          n.session[i].call = ANSWER;
        });
      else if (o.serve && s.stored != 2 * i)
        out.step(PROMPT, "session %d: take refused, the stored epoch is another's", i, [&](State& n) {
          n.session[i].call = NO_CALL;
          owe_serve(n, i);
        });
      else
        out.step(PROMPT, "session %d: take has run", i, [&](State& n) {
          Session& d = n.session[i];
          d.call = ANSWER;
          if (!o.serve) d.asked = free_places(c);
          take(n, i, d.asked);
          if (s.stored == 2 * i) return;
          n.stored = 2 * i;
          for (int k = 1; k < i; k++) give_back(n, k);
        });
    }
    if (c.call == ANSWER) {
      out.step(PROMPT, "session %d: the answer", i, [&](State& n) { answered(n, i); });
      if (s.lost_answers && s.faults)
        out.step(FAULT, "session %d: the answer is LOST", i, [&](State& n) {
          use(n, &State::lost_answers);
          Session& d = n.session[i];
          d.call = NO_CALL;
          d.asked = 0;
          d.adrift |= d.answer;
          d.answer = 0;
          if (o.serve_after_lost_answer) owe_serve(n, i);
        });
    }
  }

  void answered(State& n, int i) const {
    Session& c = n.session[i];
    c.held |= c.answer;
    const bool full = count(c.answer) >= c.asked && (c.asked || !o.serve || o.debt_outlives_full_window);
    c.asked = c.answer = 0;
    c.call = NO_CALL;
    c.known = 1;
    if (o.serve) {
      if (o.full_answer_repeats && full) c.owes_take = 1;
      send_owed(n, i);
    } else if (c.owes_take || (o.full_answer_repeats && full)) {
      c.owes_take = 0;
      take_or_owe(n, i);
    }
  }

  void finish_job(const State& s, int i, Steps<State>& out) const {
    const Session& c = s.session[i];
    if (!c.held || c.phase != LIVE) return;
    const int job = __builtin_ctz(c.held);
    out.step(PROMPT, "session %d: job %d done, its place is free", i, job, [&](State& n) {
      Session& d = n.session[i];
      d.held &= ~(1 << job);
      n.done |= 1 << job;
      n.taken &= ~(1 << job);
      if (o.serve) {
        if (o.take_when_freed) send_owed(n, i);
      } else if (o.take_when_freed && d.call == NO_CALL && (!o.take_when_freed_only_if_owed || d.owes_take)) {
        d.call = TAKE;
        d.owes_take = 0;
      }
    });
  }

  void heartbeat(const State& s, int i, Steps<State>& out) const {
    const Session& c = s.session[i];
    if (!c.known && !o.serve) return;
    out.step(SLOW, "session %d: heartbeat", i, [&](State& n) {
      if (s.stored > 2 * i && !o.serve) {
        end(n, i);
        return;
      }
      if (o.serve) {
        owe_serve(n, i);
      } else {
        n.stored = 2 * i;
        n.presence = c.worker;
        if (o.take_at_heartbeat) take_or_owe(n, i);
      }
      if (c.call != NO_CALL || c.phase != LIVE || i != s.sessions) return;
      int places = free_places(c);
      for (int k = 0; k < JOBS && places > 0; k++) {
        if (!(unread(s) >> k & 1)) continue;
        places--;
        if (n.waited[k] < 3) n.waited[k]++;
      }
    });
  }

  void flush(const State& s, Steps<State>& out) const {
    if (s.flushes && s.faults)
      out.step(FAULT, "Redis FLUSHED; the sweeper and re-assert follow", [&](State& n) {
        use(n, &State::flushes);
        n.stored = n.presence = n.notes = 0;
        memset(n.waited, 0, JOBS);
        n.reborn = 1;
        if (o.clock_back) n.deaf = 1 << 1 | 1 << 2;
        n.taken = 0;
        for (int i = 1; i <= s.sessions; i++) {
          n.taken |= s.session[i].held;
          n.session[i].adrift = 0;
        }
      });
    if (!s.reborn) return;
    for (int i = 1; i <= s.sessions; i++) {
      const Session& c = s.session[i];
      if (c.phase == CLOSED || !c.known || s.stored > 2 * i) continue;
      out.step(PROMPT, "session %d sees that Redis began anew: asserts again", i, [&](State& n) {
        if (o.rewind_when_reborn) n.deaf &= ~(1 << c.worker);
        if (c.phase == LIVE) n.reborn = 0;
        if (o.serve) {
          owe_serve(n, i);
          return;
        }
        assert_epoch(n, i);
        take_or_owe(n, i);
      });
    }
  }

  static constexpr const char* ONE_HEARTBEAT = "no job sits through two heartbeats of a holder with room";

  Claims<State> claims() const {
    return {
        {{ONE_HEARTBEAT,
          [](const State& s) {
            for (int k = 0; k < JOBS; k++)
              if (s.waited[k] > 1 && !(s.done >> k & 1)) return false;
            return true;
          }}},
        [](const State& s) { return s.accepted == JOBS && s.done == (1 << JOBS) - 1; },
        o.lost_notes == 0 && o.take_at_heartbeat,
    };
  }
};
