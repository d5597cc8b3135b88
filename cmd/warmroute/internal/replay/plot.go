package replay

import (
	"fmt"
	"html"
	"io"
	"math"
	"strings"
)

// Plot writes an SVG with the hit ratio and the spread of the work over time, one line for each result.
func Plot(w io.Writer, results []*Result) error {
	const width, height, left, top, gap = 860, 250, 60, 40, 70
	end, spread := 1.0, 1.25
	for _, r := range results {
		for _, x := range r.Windows {
			end = max(end, x.Start)
			spread = max(spread, min(x.Busiest, 3)) // a trap must not flatten the others
		}
	}
	var b strings.Builder
	total := 2*(height+gap) + top + 22*len(results)
	fmt.Fprintf(&b, `<svg xmlns="http://www.w3.org/2000/svg" width="%d" height="%d" font-family="sans-serif" font-size="12">`+"\n",
		width+left+30, total)
	b.WriteString(`<rect width="100%" height="100%" fill="white"/>` + "\n")
	for i, panel := range []struct {
		title    string
		low, top float64
		value    func(Window) float64
	}{
		{"hit ratio: part of the prompts' blocks that were cached", 0, 0.6, func(x Window) float64 { return x.HitRatio }},
		{"spread: work of the busiest worker, in means", 1, spread, func(x Window) float64 { return x.Busiest }},
	} {
		y0 := top + i*(height+gap)
		y := func(v float64) float64 {
			v = math.Max(panel.low, math.Min(v, panel.top))
			return float64(y0+height) - (v-panel.low)/(panel.top-panel.low)*height
		}
		fmt.Fprintf(&b, `<text x="%d" y="%d" font-size="14">%s</text>`+"\n", left, y0-12, panel.title)
		for k := range 6 {
			v := panel.low + (panel.top-panel.low)*float64(k)/5
			fmt.Fprintf(&b, `<line x1="%d" x2="%d" y1="%.1f" y2="%.1f" stroke="#ddd"/>`+"\n", left, left+width, y(v), y(v))
			fmt.Fprintf(&b, `<text x="%d" y="%.1f" text-anchor="end">%.2f</text>`+"\n", left-8, y(v)+4, v)
		}
		for k := range 7 {
			x := left + width*k/6
			fmt.Fprintf(&b, `<text x="%d" y="%d" text-anchor="middle">%.0f s</text>`+"\n", x, y0+height+18, end*float64(k)/6)
		}
		for n, r := range results {
			var points []string
			for _, x := range r.Windows {
				points = append(points, fmt.Sprintf("%.1f,%.1f", left+x.Start/end*width, y(panel.value(x))))
			}
			fmt.Fprintf(&b, `<polyline fill="none" stroke="%s" stroke-width="1.6" points="%s"/>`+"\n",
				color(n, len(results)), strings.Join(points, " "))
		}
	}
	for n, r := range results {
		y := 2*(height+gap) + top + 22*n
		fmt.Fprintf(&b, `<rect x="%d" y="%d" width="18" height="4" fill="%s"/>`+"\n", left, y-6, color(n, len(results)))
		fmt.Fprintf(&b, `<text x="%d" y="%d">%s: hit ratio %.3f, busiest %.2f, TTFT mean %.2f s</text>`+"\n",
			left+26, y, html.EscapeString(r.Name()), r.HitRatio, r.Busiest, r.TTFT.Mean)
	}
	b.WriteString("</svg>\n")
	_, err := io.WriteString(w, b.String())
	return err
}

func color(n, of int) string { return fmt.Sprintf("hsl(%d 75%% 40%%)", 360*n/max(of, 1)) }
