// The steps of the window: what the machine, its sessions, the sweeper and the faults do. window_state.hpp has the
// scope, the state, the rules that can be taken away, and what is claimed.
#pragma once

#include "window_state.hpp"

struct Window : WindowState {
  void next(const State& s, Steps<State>& out) const {
    for (int q = 0; q < JOBS; q++) {
      const int j = o.order[q] - '0';
      if (s.job[j].record) continue;
      out.step(PROMPT, "job %d accepted and enqueued", j, [&](State& n) {
        n.job[j].record = QUEUED;
        enqueue(n, j);
      });
      break;
    }
    connect(s, out);
    if (s.machine_up && !s.asleep) run_machine(s, out);
    if (s.asleep)
      out.step(PROMPT, "laptop wakes", [](State& n) {
        n.asleep = 0;
        n.slept = 1;
      });
    if (!s.machine_up) out.step(PROMPT, "sidecar starts again", [](State& n) { n.machine_up = 1; });
    for (int i = 1; i <= s.sessions; i++) run_session(s, i, out);
    for (int j = 0; j < JOBS; j++) sweep(s, j, out);
    if (may(s, &State::flushes))
      out.step(FAULT, "Redis FLUSHED", [&](State& n) {
        use(n, &State::flushes);
        n.stored = 0;
        for (int j = 0; j < JOBS; j++) {
          settle(n, j);
          for (int i = 1; i <= s.sessions; i++) {
            const Session& c = s.session[i];
            if (c.held[j] || ((c.taking | c.claiming) >> j & 1)) n.session[i].lost_entry |= 1 << j;
          }
        }
      });
  }

  void connect(const State& s, Steps<State>& out) const {
    bool live = false;
    for (int i = 1; i <= s.sessions; i++) live |= s.session[i].phase == LIVE;
    if (!s.machine_up || s.asleep || s.slept || live || s.sessions == SESSIONS_MAX) return;
    out.step(PROMPT, o.serve ? "machine connects: session %d begins" : "machine connects: session %d asserts",
             s.sessions + 1, [&](State& n) {
               const int i = ++n.sessions;
               Session& c = n.session[i];
               c.phase = LIVE;
               c.owes_claim = 1;
               if (!o.serve) n.stored = 2 * i;
               for (int j = 0; j < JOBS; j++) {
                 Job& job = n.job[j];
                 if (o.hello_lists_running && job.lane == STARTED) {
                   c.held[j] = SENT;
                   c.claimed |= 1 << j;
                   job.joined |= 1 << i;
                 }
                 if (o.delete_full_consumers && job.entry == PENDING &&
                     (job.owner == FORGOTTEN || n.session[job.owner].phase == CLOSED))
                   job.entry = ADRIFT;
               }
             });
  }

  // ---- the machine

  void run_machine(const State& s, Steps<State>& out) const {
    int started = NOBODY, waiting = NOBODY;
    for (int j = 0; j < JOBS; j++) {
      if (s.job[j].lane == STARTED) started = j;
      if (s.job[j].lane == WAITING && (waiting == NOBODY || s.job[j].place < s.job[waiting].place)) waiting = j;
    }
    if (started == NOBODY && waiting != NOBODY && !(s.slept && o.sleep_noticed_at_start)) start(s, waiting, out);
    if (started != NOBODY) finish(s, started, out);
    if (s.slept)
      out.step(PROMPT, "machine notices that it slept: drops its sockets", [&](State& n) {
        n.slept = 0;
        half_open_all(n);
      });
    if (may(s, &State::kills))
      out.step(FAULT, "sidecar KILLED", [&](State& n) {
        use(n, &State::kills);
        n.slept = 0;
        clear_lane(n, s);
      });
    if (may(s, &State::hint_changes))
      out.step(FAULT, "the hint of job 0's tool changes on the machine", [](State& n) {
        use(n, &State::hint_changes);
        n.hint_changed = 1;
      });
    if (may(s, &State::sleeps) && !s.slept)
      out.step(FAULT, "laptop SLEEPS", [](State& n) {
        use(n, &State::sleeps);
        n.asleep = 1;
      });
  }

  void start(const State& s, int j, Steps<State>& out) const {
    auto refuse = [&](const char* label) {
      out.step(PROMPT, label, j, [&](State& n) {
        n.job[j].lane = OUTSIDE;
        answer_joined(n, s, j, FAILED);
        n.job[j].joined = 0;
      });
    };
    if (s.job[j].late && o.deadline_at_start) {
      refuse("lane: job %d is past its deadline: answered, not run");
    } else if (o.hint_in_frame && hinted_on_machine(s, j) != hinted(j)) {
      refuse("lane: hint of job %d is not what the frame says: answered, not run");
    } else if (j == o.poison) {
      out.step(PROMPT, "lane: job %d KILLS the sidecar", j, [&](State& n) { clear_lane(n, s); });
    } else {
      out.step(PROMPT, "lane: job %d journalled and STARTED", j, [&](State& n) {
        Job& job = n.job[j];
        const bool hinted_here = hinted_on_machine(s, j);
        job.lane = STARTED;
        job.row = RUNNING;
        job.row_hinted = hinted_here;
        if (job.executions < 2 && (job.executions || !hinted_here)) job.executions++;
        if (hinted(j) && !hinted_here) job.ran_under_other_hint = 1;
        if (s.job[j].late) n.flags |= PAST_DEADLINE;
        if (s.slept) n.flags |= BEFORE_WELCOME;
      });
    }
  }

  void finish(const State& s, int j, Steps<State>& out) const {
    if (j == o.hang && o.hang_keeps_lane) {
      if (s.job[j].row == RUNNING)
        out.step(SLOW, "job %d: its timeout answers, the function goes on", j, [&](State& n) {
          n.job[j].row = ROW_UNKNOWN;
          answer_joined(n, s, j, UNKNOWN);
          if (!o.lane_busy) n.job[j].joined = 0;
        });
      else
        out.step(SLOW, "job %d: the function returns at last", j, [&](State& n) {
          n.job[j].lane = OUTSIDE;
          if (o.lane_busy) answer_joined(n, s, j, UNKNOWN);
          n.job[j].joined = 0;
        });
      return;
    }
    out.step(j == o.hang ? SLOW : PROMPT, j == o.hang ? "job %d: its timeout ends it" : "job %d: tool done, journalled",
             j, [&](State& n) {
               Job& job = n.job[j];
               job.row = job.twice_in_lane ? NO_ROW : ROW_COMPLETED;
               job.lane = job.twice_in_lane ? WAITING : OUTSIDE;
               job.twice_in_lane = 0;
               answer_joined(n, s, j, COMPLETED);
               job.joined = 0;
             });
  }

  void receive(const State& s, int i, Steps<State>& out) const {
    const Session& c = s.session[i];
    int j = NOBODY;
    for (int k = 0; k < JOBS; k++)
      if ((c.frames >> k & 1) && (j == NOBODY || s.job[k].place < s.job[j].place)) j = k;
    const Job& job = s.job[j];
    if (job.row == ROW_COMPLETED || job.row == ROW_UNKNOWN) {
      out.step(PROMPT, "machine answers job %d from the journal (session %d)", j, i, [&](State& n) {
        n.session[i].frames &= ~(1 << j);
        n.session[i].result[j] = job.row == ROW_COMPLETED ? COMPLETED : UNKNOWN;
      });
      return;
    }
    out.step(PROMPT, "frame of job %d arrives (session %d)", j, i, [&](State& n) {
      n.session[i].frames &= ~(1 << j);
      n.job[j].joined |= 1 << i;
      if (job.lane == WAITING && !o.lane_joins_waiting) n.job[j].twice_in_lane = 1;
      if (job.lane != OUTSIDE) return;
      n.job[j].lane = WAITING;
      if (!goes_alone(c, j)) return;
      for (int k = 0; k < JOBS; k++)
        if (k != j && s.job[k].lane) n.flags |= MARKED_AND_STUCK;
    });
  }

  // ---- a session

  void run_session(const State& s, int i, Steps<State>& out) const {
    const Session& c = s.session[i];
    break_session(s, i, out);
    if (c.frames && s.machine_up && !s.asleep && c.phase == LIVE) receive(s, i, out);
    if (c.frozen) return;
    if (c.phase == HALF_OPEN)
      out.step(PROMPT, "worker notices that session %d is gone", i, [&](State& n) { close(n, i, true); });
    for (int j = 0; j < JOBS; j++) {
      if (c.result[j] && c.phase == LIVE)
        out.step(PROMPT, "session %d: outcome of job %d made durable", i, j, [&](State& n) {
          end_record(n, j, static_cast<Outcome>(c.result[j]));
          n.session[i].result[j] = 0;
          if (o.lane_busy && j == o.hang && s.job[j].lane == STARTED)
            settle(n, j);  // it has ended, but its place frees only with the second result
          else
            n.session[i].held[j] = ENDING;
        });
      if (c.held[j] == ENDING)
        out.step(PROMPT, "session %d: settles job %d", i, j, [&](State& n) {
          settle(n, j);
          n.session[i].held[j] = NOT_HELD;
          n.session[i].claimed &= ~(1 << j);
          n.session[i].lost_entry &= ~(1 << j);
        });
    }
    if (c.phase == CLOSED) return;
    if (s.stored > 2 * i)
      out.step(PROMPT, "session %d finds itself outranked, stops", i, [&](State& n) { close(n, i, true); });
    else if (o.serve)
      serve_or_take(s, i, out);
    else
      assert_claim_take(s, i, out);
    answers(s, i, out);
    deliver(s, i, out);
  }

  void break_session(const State& s, int i, Steps<State>& out) const {
    const Session& c = s.session[i];
    if (c.phase == LIVE && may(s, &State::drops))
      out.step(FAULT, "socket of session %d drops", i, [&](State& n) {
        use(n, &State::drops);
        half_open(n, i);
      });
    if (c.phase == LIVE && s.asleep)
      out.step(PROMPT, "worker gives session %d up (no pong)", i, [&](State& n) { close(n, i, true); });
    if (c.phase == LIVE && c.frozen)
      out.step(PROMPT, "sidecar gives session %d up (worker frozen)", i, [&](State& n) { half_open(n, i); });
    if (c.phase != CLOSED && may(s, &State::worker_kills))
      out.step(FAULT, "worker of session %d KILLED", i, [&](State& n) {
        use(n, &State::worker_kills);
        close(n, i, false);
      });
    if (c.phase != CLOSED && !c.frozen && may(s, &State::freezes))
      out.step(FAULT, "worker of session %d FREEZES", i, [&](State& n) {
        use(n, &State::freezes);
        n.session[i].frozen = 1;
      });
    if (c.frozen) out.step(PROMPT, "worker of session %d wakes", i, [&](State& n) { n.session[i].frozen = 0; });
  }

  bool has_unread(const State& s) const {
    return std::any_of(s.job, s.job + JOBS, [](const Job& job) { return job.entry == UNREAD; });
  }
  // Something is pending that this session neither holds under its own name nor is about to be told of.
  bool has_loose(const State& s, int i) const {
    const Session& c = s.session[i];
    for (int j = 0; j < JOBS; j++)
      if (s.job[j].entry == PENDING && (!c.held[j] || s.job[j].owner != i) && !((c.taking | c.claiming) >> j & 1))
        return true;
    return false;
  }

  // At Redis. Takes up to `places` unread entries; returns the places left.
  int take(State& n, int i, int places) const {
    Session& c = n.session[i];
    in_stream_order(n, [&](int j) {
      if (n.job[j].entry != UNREAD || !places) return;
      places--;
      n.job[j].entry = PENDING;
      n.job[j].owner = i;
      c.taking |= 1 << j;
      if (!c.held[j]) c.lost_entry &= ~(1 << j);
    });
    return places;
  }

  // At Redis. Moves all that is pending; returns bodies of what is not in flight, up to `places`, and the places left.
  int claim(State& n, const State& s, int i, int places) const {
    Session& c = n.session[i];
    c.owes_claim = c.left_behind = 0;
    in_stream_order(s, [&](int j) {
      if (s.job[j].entry != PENDING) return;
      n.job[j].owner = i;
      if (s.job[j].owner == i && !o.own_entries_claimed) return;
      bool in_flight = c.held[j] && (o.in_flight_until_settled || c.held[j] != ENDING);
      if (!o.in_flight_by_job && (c.lost_entry >> j & 1)) in_flight = false;
      if (in_flight && o.in_flight_dropped) return;
      if (!places) {
        c.left_behind = 1;
        return;
      }
      places--;
      c.claiming |= 1 << j;
      if (!c.held[j]) c.lost_entry &= ~(1 << j);
    });
    return places;
  }

  void assert_claim_take(const State& s, int i, Steps<State>& out) const {
    const Session& c = s.session[i];
    const int free = free_places(c);
    if (s.stored < 2 * i)
      out.step(PROMPT, "session %d asserts its epoch again", i, [&](State& n) {
        n.stored = 2 * i;
        n.session[i].owes_claim = 1;
      });
    const bool may_take =
        !o.one_call_at_a_time || (!c.claiming && !c.owes_claim && !(c.left_behind && o.rest_claimed_first));
    if (has_unread(s) && free && !c.taking && may_take && (o.take_raises_epoch || s.stored == 2 * i))
      out.step(PROMPT, "session %d: take has run", i, [&](State& n) {
        take(n, i, free);
        if (s.stored == 2 * i) return;
        n.stored = 2 * i;
        n.session[i].owes_claim = 1;
      });
    if (s.stored != 2 * i || c.claiming || (o.one_call_at_a_time && c.taking)) return;
    const bool due = c.owes_claim || (c.left_behind && o.rest_claimed_first && free);
    if (due || has_loose(s, i))
      out.step(due ? PROMPT : SLOW, due ? "session %d: claim has run" : "session %d: claim at a heartbeat", i,
               [&](State& n) { claim(n, s, i, free); });
  }

  void serve_or_take(const State& s, int i, Steps<State>& out) const {
    const Session& c = s.session[i];
    if (c.taking || c.claiming) return;  // one call at a time
    const int free = free_places(c);
    const bool due = c.owes_claim || s.stored < 2 * i || (c.left_behind && o.rest_claimed_first && free);
    if (c.given_up && s.stored == 2 * i)
      out.step(PROMPT, "session %d: the take that was given up runs, nobody hears its answer", i, [&](State& n) {
        take(n, i, c.given_up);
        n.session[i].taking = n.session[i].given_up = 0;
      });
    if (due || has_loose(s, i) || (c.left_behind && free))
      out.step(due ? PROMPT : SLOW, due ? "session %d: serve has run" : "session %d: serve at a heartbeat", i,
               [&](State& n) {
                 n.stored = 2 * i;
                 if (o.late_calls_refused) n.session[i].given_up = 0;
                 if (o.serve_takes_first)
                   claim(n, s, i, take(n, i, free));
                 else
                   take(n, i, claim(n, s, i, free));
               });
    if (due || !has_unread(s) || !free) return;
    out.step(PROMPT, "session %d: take has run", i, [&](State& n) { take(n, i, free); });
    if (o.calls_run_late && !c.given_up && may(s, &State::lost_answers))
      out.step(FAULT, "session %d: its take is given up before it ran", i, [&](State& n) {
        use(n, &State::lost_answers);
        n.session[i].given_up = free;
        n.session[i].owes_claim = 1;
      });
  }

  void answers(const State& s, int i, Steps<State>& out) const {
    const Session& c = s.session[i];
    if (o.serve) {
      if (!c.taking && !c.claiming) return;
      out.step(PROMPT, "session %d: the answer", i, [&](State& n) {
        hold_claimed(n, c, i);
        hold_taken(n, c, i);
      });
      if (may(s, &State::lost_answers))
        out.step(FAULT, "session %d: the answer is LOST", i, [&](State& n) {
          use(n, &State::lost_answers);
          n.session[i].taking = n.session[i].claiming = 0;
          if (o.claim_after_lost_answer) n.session[i].owes_claim = 1;
        });
      return;
    }
    if (c.taking) {
      out.step(PROMPT, "session %d: answer of its take", i, [&](State& n) { hold_taken(n, c, i); });
      if (may(s, &State::lost_answers))
        out.step(FAULT, "session %d: answer of its take LOST", i, [&](State& n) {
          use(n, &State::lost_answers);
          n.session[i].taking = 0;
          if (o.claim_after_lost_answer) n.session[i].owes_claim = 1;
        });
    }
    if (c.claiming) {
      out.step(PROMPT, "session %d: answer of its claim", i, [&](State& n) { hold_claimed(n, c, i); });
      if (may(s, &State::lost_answers))
        out.step(FAULT, "session %d: answer of its claim LOST", i, [&](State& n) {
          use(n, &State::lost_answers);
          n.session[i].claiming = 0;
          if (o.claim_after_lost_answer) n.session[i].owes_claim = 1;
        });
    }
  }

  void hold_taken(State& n, const Session& c, int i) const {
    Session& d = n.session[i];
    d.taking = 0;
    for (int j = 0; j < JOBS; j++) {
      if (!(c.taking >> j & 1)) continue;
      if (c.held[j]) {
        if (!o.in_flight_by_job && (c.lost_entry >> j & 1)) n.flags |= TWICE_AT_ONCE;
        continue;
      }
      d.held[j] = HELD;
      d.claimed &= ~(1 << j);
    }
  }

  void hold_claimed(State& n, const Session& c, int i) const {
    Session& d = n.session[i];
    d.claiming = 0;
    for (int j = 0; j < JOBS; j++) {
      if (!(c.claiming >> j & 1)) continue;
      if (c.held[j]) {
        n.flags |= c.held[j] == ENDING ? AFTER_OUTCOME : TWICE_AT_ONCE;
        continue;
      }
      d.held[j] = HELD;
      d.claimed |= 1 << j;
      if (c.taking >> j & 1) n.flags |= TWICE_AT_ONCE;
    }
  }

  // The next of the held jobs, in stream order; one that is marked comes first.
  void deliver(const State& s, int i, Steps<State>& out) const {
    const Session& c = s.session[i];
    int flying = 0, alone = 0, j = NOBODY;
    for (int k = 0; k < JOBS; k++) {
      if (c.held[k] == MARKED || c.held[k] == SENT) {
        flying++;
        alone += goes_alone(c, k);
      }
      if ((c.held[k] == HELD || c.held[k] == MARKED) && (j == NOBODY || s.job[k].place < s.job[j].place)) j = k;
    }
    for (int k = 0; k < JOBS; k++)
      if (c.held[k] == MARKED) j = k;
    if (j == NOBODY) return;
    if (c.held[j] == MARKED) {
      send(s, i, j, out);
      return;
    }
    const bool place = goes_alone(c, j) ? !flying : !alone && flying < o.window;
    if (o.windowed && !place) return;
    const Job& job = s.job[j];
    const bool mark = !hinted(j) || (c.claimed >> j & 1);
    auto end = [&](const char* label, auto how) {
      out.step(PROMPT, label, i, j, [&](State& n) {
        how(n);
        n.session[i].held[j] = ENDING;
      });
    };
    if (!mark && !job.late)
      send(s, i, j, out);
    else if (!mark)
      end("session %d: job %d is past its deadline: settled", [&](State& n) { end_late(n, j); });
    else if (job.record == TERMINAL)
      end("session %d: mark finds a terminal record of job %d", [](State&) {});
    else if (o.limit && job.marks >= o.limit && job.lane != STARTED)
      end("session %d: poison limit of job %d", [&](State& n) {
        end_record(n, j, hinted(j) ? UNDELIVERABLE : UNKNOWN);
        if (j != o.poison) n.flags |= INNOCENT_ENDED;
      });
    else if (job.late)
      end("session %d: job %d is past its deadline at the mark", [&](State& n) { end_late(n, j); });
    else
      out.step(PROMPT, "session %d: marks job %d begun", i, j, [&](State& n) {
        n.job[j].record = BEGUN;
        if (n.job[j].marks < 3) n.job[j].marks++;
        n.session[i].held[j] = MARKED;
      });
  }

  void send(const State& s, int i, int j, Steps<State>& out) const {
    const Session& c = s.session[i];
    out.step(PROMPT, "session %d: sends job %d", i, j, [&](State& n) {
      n.session[i].held[j] = SENT;
      if (c.phase != LIVE) return;
      n.session[i].frames |= 1 << j;
      for (int k = 0; k < JOBS; k++) {
        const Job& other = s.job[k];
        const bool overtaken = k != j && !(c.lost_entry >> j & 1) && other.entry && other.place < s.job[j].place &&
                               other.record != TERMINAL && c.held[k] < MARKED;
        if (overtaken) n.flags |= OUT_OF_ORDER;
      }
    });
  }

  // ---- sweeper, cancel, deadline

  void sweep(const State& s, int j, Steps<State>& out) const {
    const Job& job = s.job[j];
    const bool open = job.record == QUEUED || job.record == BEGUN;
    if (open && !job.entry) out.step(PROMPT, "sweeper enqueues job %d again", j, [&](State& n) { enqueue(n, j); });
    if (job.record == TERMINAL && job.entry && o.sweeper_settles)
      out.step(PROMPT, "sweeper settles job %d", j, [&](State& n) { settle(n, j); });
    if (job.record == QUEUED && may(s, &State::ends))
      out.step(FAULT, "job %d CANCELLED", j, [&](State& n) {
        use(n, &State::ends);
        end_record(n, j, EXPIRED);
      });
    if (open && may(s, &State::ends))
      out.step(FAULT, "job %d: DEADLINE passes", j, [&](State& n) {
        use(n, &State::ends);
        n.job[j].late = 1;
      });
    if (job.late && job.record != TERMINAL)
      out.step(PROMPT, "deadline of job %d written", j, [&](State& n) { end_late(n, j); });
  }
};
